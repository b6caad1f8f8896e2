"""Prefill and decode apart through whatever may happen: every request ends once, and nothing is left behind.

Histories are drawn over workers of three pools that come, go and fail, requests that are cancelled or too late, and
everything that workers say, also twice, too late, and of what they never did.
"""

from collections import Counter
from typing import Any

import msgspec
from hypothesis import given, note
from hypothesis import strategies as st

from forebay.core.phases import Phase
from forebay.core.routing.eligibility import Ineligible
from forebay.core.selection.candidates import find_retry_candidates
from forebay.core.selection.disaggregation import requires_remote_prefill
from forebay.core.selection.stages import as_prefill_request
from forebay.core.state.active_request import ActiveRequest
from forebay.core.step import AnyDecision, InputEvent
from forebay.events.control import BusyThresholds, BusyThresholdsSet, DisaggregationSet, QueueConfig
from forebay.events.decisions import KvReleased, RequestAborted, RequestHeld, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerLost
from forebay.events.progress import FirstTokenEmitted, PrefillFailed, PrefillFinished, RequestFailed, RequestFinished
from forebay.events.requests import RoutingHints
from forebay.events.snapshots import Booking
from tests.core.worlds import (
    DISAGGS,
    FACTS,
    LEASE_US,
    MEDIA,
    PROGRESS_KINDS,
    PROMPTS,
    Driver,
    decode_pool,
    disagg_policy_of,
    encoder,
    joined,
    may_go,
    prefill_pool,
    prefiller,
    query,
    request,
    said_of,
)

FLEET = {"d": "decode", "e": "decode", "p": "prefill", "q": "prefill", "n": "encode"}
ATTEMPTS_MAX = 3
Offer = tuple[str, int, str, int]  # request, attempt to compute its prompt, worker, its epoch
LOCAL_BY_RULE = {"never", "begun", "short_prompt", "prefill_busy"}
# What lets a decode worker's pool be asked for another while its prefill pool may not.
QUEUES = (QueueConfig(), QueueConfig(threshold=0.25))


class Books(Driver):
    """A driver that keeps the books of what began and ended, and looks at everything after each event.

    `offers` is the KV that workers keep, as they know it: until it was fetched, they were told to give it back, or are
    lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.began: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.refused: set[str] = set()
        self.routed: list[RequestRouted] = []
        self.offers: set[Offer] = set()
        self.released: Counter[str] = Counter()

    def __call__(self, topic: str, event: InputEvent | None, after_us: int = 10) -> list[Any]:
        under_way = {one.submitted.request_id for one in self.world.requests.active()}
        outdated = self.world.counts["stale_progress"]
        made = super().__call__(topic, event, after_us)
        if self.world.counts["stale_progress"] == outdated:
            self._keep(event)
        if isinstance(event, RequestFinished | RequestFailed) and event.request_id in under_way:
            aborted = any(isinstance(one, RequestAborted) and one.request_id == event.request_id for one in made)
            self.ended[event.request_id] += self.world.requests.get(event.request_id) is None and not aborted
        self._look(made)
        return made

    def wait(self, us: int) -> list[Any]:
        made = super().wait(us)
        self._look(made)
        return made

    def _keep(self, event: InputEvent | None) -> None:
        """What a worker said counts: who keeps KV now."""
        match event:
            case PrefillFinished():
                self.offers.add((event.request_id, event.attempt, event.worker_id, event.worker_epoch))
            case FirstTokenEmitted(unfetched=False):
                self.offers = {one for one in self.offers if one[0] != event.request_id}
            case WorkerLost():
                self.offers = {one for one in self.offers if one[2:] != (event.worker_id, event.worker_epoch)}
            case _:
                pass

    def _look(self, made: list[AnyDecision]) -> None:
        for one in made:
            match one:
                case KvReleased(holder=holder):
                    self.released[one.reason] += 1
                    self.offers.remove((one.request_id, one.attempt, holder.worker_id, holder.worker_epoch))
                case RequestAborted(holder=holder) if holder is not None:
                    self.ended[one.request_id] += 1
                    (kept,) = [offer for offer in self.offers if offer[0] == one.request_id]
                    assert kept[2:] == (holder.worker_id, holder.worker_epoch)
                    self.offers.remove(kept)
                case RequestRouted():
                    self.routed.append(one)
                    self.began[one.request_id] |= 1
                    self._look_at_routing(one)
                case RequestHeld():
                    self.began[one.request_id] |= 1
                case RequestAborted():
                    self.ended[one.request_id] += 1
                case RequestRejected() if one.request_id in self.began:
                    self.ended[one.request_id] += 1
                case _:
                    pass
        self._look_at_requests()
        self._look_at_load()
        wanted = {
            (one.submitted.request_id, one.prefills, one.prefilled.worker_id, one.prefilled.worker_epoch)
            for one in self.world.requests.active()
            if one.prefilled is not None
        }
        assert {offer for offer in wanted if self.epoch(offer[2]) == offer[3]} == self.offers, "nobody else keeps any"
        self.copy()

    def _look_at_routing(self, routed: RequestRouted) -> None:
        world = self.world
        worker = world.fleet.get(routed.worker_id)
        assert worker is not None
        assert worker.spec.pool == routed.pool
        role = {"encode": "encode", "prefill": "prefill"}.get(routed.stage, "decode")
        assert world.pools[routed.pool].role == role
        assert routed.attempt <= ATTEMPTS_MAX
        assert (routed.prefill is None) == (routed.stage in ("encode", "decode"))
        if routed.prefill is not None:
            assert routed.prefill.remote == (routed.stage == "prefill")
            config = world.settings.disagg_of(world.pools["default"])
            assert routed.prefill.remote or not config.enforce or routed.prefill.reason in LOCAL_BY_RULE

    def _look_at_requests(self) -> None:
        for one in self.world.requests.active():
            assert max(one.attempt, one.prefills, one.encodings) <= ATTEMPTS_MAX
            if one.on_worker:
                worker = self.world.fleet.get(one.worker_id)
                assert worker is not None
                assert worker.worker_epoch == one.worker_epoch
            elif one.phase is Phase.QUEUED:
                # One that waits may stand behind another of its length that has to wait.
                assert not may_go(self.world, one) or disagg_policy_of(self.world, one) not in ("always", "never")
            else:
                assert one.phase is Phase.WAITING
                assert not self._may_be_sent(one), f"{one} waits for nobody"
            if one.prefilled is not None and one.phase is Phase.WAITING:
                assert self.epoch(one.prefilled.worker_id) == one.prefilled.worker_epoch
            if one.phase is not Phase.WAITING and one.prefilled is not None:
                assert one.phase is Phase.TRANSFER

    def _may_be_sent(self, one: ActiveRequest) -> bool:
        world, config = self.world, self.world.pools[one.submitted.pool]
        try:
            find_retry_candidates(world, config, one.submitted)
            if one.has_kept_kv(world.now_us) or not requires_remote_prefill(world, config, one):
                return True
            found = world.prefillers_of(config)
            if found is not None:
                find_retry_candidates(world, found, as_prefill_request(one.submitted, found.pool))
            return found is not None
        except Ineligible:
            return False

    def _look_at_load(self) -> None:
        booked = {part.request_id: part for part in self.world.load.snapshot() if isinstance(part, Booking)}
        on_worker = {one.submitted.request_id: one for one in self.world.requests.active() if one.on_worker}
        assert booked.keys() == on_worker.keys()
        assert all(booked[name].worker_id == one.worker_id for name, one in on_worker.items())


def system(queue: int, disagg: int) -> Books:
    drive = Books()
    drive("control", decode_pool(disagg=DISAGGS[disagg], queue=QUEUES[queue], session_ttl_s=10.0))
    drive("control", prefill_pool(queue=QUEUES[queue]))
    drive.encoders()
    for number, name in enumerate(FLEET):
        join(drive, name, number)
    return drive


def join(drive: Driver, name: str, slot: int) -> None:
    match FLEET[name]:
        case "decode":
            drive("fleet", joined(name, slot, role="decode"))
        case "prefill":
            drive("fleet", prefiller(name, slot))
        case _:
            drive("fleet", encoder(name, slot))


KINDS = (
    *("request",) * 4,
    *("media", "session", "query", "cancel", "cancel", "again", "too_late", "wait", "wait"),
    *("prefilled",) * 4,
    *(sorted(PROGRESS_KINDS - {"prefilled"})),
    *("lose", "lose", "lease_over", "join", "join", "join", "drain", "suspect", "recover"),
    *("disagg", "busy", "pool"),
)
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(0, 8)), max_size=70)


def perform(drive: Books, number: int, kind: str, first: int, depth: int, past: list[Any]) -> None:
    under_way = drive.world.requests.active()
    one = under_way[first % len(under_way)] if under_way else None
    name = tuple(FLEET)[first % len(FLEET)]
    blocks = PROMPTS[first % 3][:depth]
    match kind:
        case "request":
            timeout_us = 2_000 if first == 0 else 1_000_000
            drive("requests", request(f"r{number}", blocks, timeout_us=timeout_us, nonce=number))
        case "media":
            drive("requests", request(f"r{number}", blocks, nonce=number, media=(MEDIA,)))
        case "session":
            hints = RoutingHints(session_id=f"s{first % 2}", worker_id="d" if depth == 0 else "")
            drive("requests", request(f"r{number}", blocks, nonce=number, routing=hints))
        case "query":
            drive("requests", query(f"q{number}", blocks))
        case "cancel" if one is not None:
            drive.cancel(one.submitted.request_id)
        case "again" | "too_late" if past:
            drive("progress", past[first % len(past)])
        case "wait":
            drive.wait(first * 200)
        case "lose" | "drain" | "suspect" | "recover":
            drive.fact(FACTS[kind], name)
        case "lease_over":
            for decoder in ("d", "e"):
                drive.lose(decoder)
            if one is not None:
                drive("progress", said_of(one, "prefilled", 1))
            drive.wait(LEASE_US)
            join(drive, "d", first)
        case "join":
            join(drive, name, first)
        case "disagg":
            drive("control", DisaggregationSet(model="m", disagg=DISAGGS[first % len(DISAGGS)]))
        case "busy":
            most = depth * 8 if first % 2 else None
            thresholds = BusyThresholds(active_prefill_tokens_threshold=most)
            drive("control", BusyThresholdsSet(model="m", thresholds=thresholds))
        case "pool":
            drive("control", prefill_pool(queue=QUEUES[first % 2]))
        case _ if kind in PROGRESS_KINDS and one is not None:
            event = said_of(one, kind, number)
            past.append(event)
            drive("progress", event)
        case _:
            pass


@given(STEPS, st.integers(0, 1), st.integers(0, len(DISAGGS) - 1))
def test_whatever_happens_every_request_ends_once_and_leaves_nothing(
    steps: list[tuple[str, int, int]], queue: int, disagg: int
) -> None:
    drive = system(queue, disagg)
    past: list[Any] = []
    for number, (kind, first, depth) in enumerate(steps):
        note(f"{number} {kind} {first} {depth}")
        perform(drive, number, kind, first, depth, past)
    drive.wait(2_000_000)
    assert not len(drive.world.requests), "all deadlines have passed"
    assert not drive.offers, "all that was kept was fetched or given back, or went with its holder"
    assert drive.ended == drive.began
    for load in drive.world.load.ranks():
        assert (load.prefill_tokens, load.decode_blocks, load.active_requests) == (0, 0.0, 0)
    for name in {one.request_id for one in drive.routed}:
        for stages in (("encode",), ("prefill",), ("aggregated", "decode")):
            attempts = [one.attempt for one in drive.routed if one.request_id == name and one.stage in stages]
            assert attempts == sorted(set(attempts))
            assert len(attempts) <= ATTEMPTS_MAX


@given(st.lists(st.sampled_from(["prefilled", "not_prefilled", "not_fetched", "lose"]), max_size=20), st.booleans())
def test_an_uncancelled_request_ends_in_a_bounded_number_of_steps(faults: list[str], enforce: bool) -> None:
    """With workers that come back at once, no history of failures keeps a request from an end."""
    drive = system(0, 1 if enforce else 0)
    drive("requests", request("r", PROMPTS[0]))
    stages = []
    for number, fault in enumerate([*faults, *("prefilled", "first", "finish") * 4]):
        one = drive.world.requests.get("r")
        if one is None:
            break
        assert one.on_worker, "somebody is there"
        stages.append(one.stage)
        if fault == "lose":
            name = one.worker_id
            drive.lose(name)
            join(drive, name, number)
        else:
            event = said_of(one, fault, 1 + 10 * number)
            if isinstance(event, PrefillFailed):
                event = msgspec.structs.replace(event, status=503)
            drive("progress", event)
    assert drive.ended == {"r": 1}
    assert stages.count("prefill") >= 1
