"""Who may take a request: constraints, taints, adapters, busy workers, sessions, and workers that rejected it."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.restore import restore
from forebay.core.state.fleet import AVOIDED_S_MAX
from forebay.core.state.submitted_request import content_hash
from forebay.events.base import pack_u32, pack_u64
from forebay.events.control import BusyThresholds, BusyThresholdsSet, QueueConfig
from forebay.events.decisions import RequestAborted, RequestHeld, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerDraining
from forebay.events.progress import AttemptRejected, FirstTokenEmitted, PrefillFailed, RequestFailed
from forebay.events.requests import RouterOverride, RoutingHints
from tests.core.worlds import PROMPTS, Driver, joined, pool, pool_of, prefill_pool, request


def fleet(**router: Any) -> Driver:
    drive = Driver()
    drive("control", pool(**router))
    drive("fleet", joined("a", 0, taints=("zone=x", "ssd"), loras=("sql",)))
    drive("fleet", joined("b", 1, taints=("zone=x",), dp_size=2))
    drive("fleet", joined("c", 2, taints=("ssd",), loras=("sql", "law")))
    return drive


def ask(drive: Driver, name: str = "r", blocks: int = 0, **changes: Any) -> Any:
    return drive.ask(name, PROMPTS[0][:blocks], timeout_us=10**9, **changes)


@pytest.mark.parametrize(
    ("demands", "seats"),
    [
        ({}, 4),
        ({"worker_id": "b"}, 2),
        ({"worker_id": "b", "rank": 1}, 1),
        ({"allowed_workers": ("a", "c", "gone")}, 2),
        ({"required_taints": ("zone=x",)}, 3),
        ({"required_taints": ("zone=x", "ssd")}, 1),
        ({"lora_name": "sql"}, 2),
        ({"required_taints": ("zone=x",), "lora_name": "sql"}, 1),
    ],
)
def test_what_a_request_demands_of_its_worker(demands: dict[str, Any], seats: int) -> None:
    routed = ask(fleet(), **demands)
    assert isinstance(routed, RequestRouted)
    assert routed.candidates == seats


@pytest.mark.parametrize(
    ("demands", "reason", "text"),
    [
        ({"worker_id": "d"}, "unknown_worker", "the pool default has no worker d"),
        ({"worker_id": "b", "rank": 2}, "unknown_worker", "worker b has no rank 2; ranks are 0 to 1"),
        ({"rank": 1}, "contradictory_routing", "the request names rank 1, but no worker"),
        ({"worker_id": "a", "allowed_workers": ("b",)}, "contradictory_routing", "a, which is not one of its allowed"),
        ({"worker_id": "b", "required_taints": ("ssd",)}, "no_eligible_worker", "is b and has the taints ssd"),
        ({"allowed_workers": ("d", "e")}, "no_eligible_worker", "is one of d, e"),
        ({"allowed_workers": tuple("defgh")}, "no_eligible_worker", "is one of d, e, f, g, …"),
        ({"lora_name": "poems"}, "no_eligible_worker", "has the adapter poems"),
    ],
)
def test_no_eligible_worker_is_reported_with_a_reason(demands: dict[str, Any], reason: str, text: str) -> None:
    drive = fleet()
    before = drive.world.load.digest(), drive.world.requests.digest()
    refused = ask(drive, **demands)
    assert isinstance(refused, RequestRejected)
    assert (refused.reason, drive.world.counts[f"rejected_{reason}"]) == (reason, 1)
    assert text in refused.message
    assert (drive.world.load.digest(), drive.world.requests.digest()) == before


def test_a_pinned_worker_of_another_pool_or_that_is_not_ready() -> None:
    drive = fleet()
    drive("fleet", joined("x", 0, pool="other"))
    assert ask(drive, worker_id="x").reason == "unknown_worker"
    drive.fact(WorkerDraining, "a")
    refused = ask(drive, worker_id="a")
    assert (refused.reason, refused.message) == ("no_eligible_worker", "no ready worker of the pool default is a")


RANK = RoutingHints(endpoint="demo.scores.rank")
IN_TURN = msgspec.structs.replace(RANK, override=RouterOverride(mode="round-robin"))


def called(drive: Driver, name: str, routing: RoutingHints = RANK, **changes: Any) -> Any:
    (decided,) = drive("requests", request(name, task="call", routing=routing, payload="{}", **changes))
    return decided


def test_a_call_goes_to_workers_with_its_endpoint_also_in_another_pool() -> None:
    drive = Driver().fleet()
    drive("fleet", joined("model", endpoints=()))
    drive("control", pool_of("scores"))
    refused = called(drive, "early")
    assert (refused.reason, refused.message) == (
        "no_eligible_worker",
        "no ready worker of the pool default can call demo.scores.rank",
    )
    for at, name in enumerate("ab"):
        drive("fleet", joined(name, at, pool="scores", tasks=(), endpoints=("demo.scores.rank",)))
    drive("fleet", joined("c", 2, pool="scores", endpoints=("demo.other.rank",)))
    for one in (drive, drive.copy()):
        assert [called(one, f"r{at}", IN_TURN).worker_id for at in range(4)] in (["a", "b"] * 2, ["b", "a"] * 2)
        assert {called(one, f"r{at}").candidates for at in (4, 5)} == {2}


def test_a_call_with_tokens_follows_the_cache_and_is_routed_again() -> None:
    drive = Driver().fleet()
    for at, name in enumerate("ab"):
        drive("fleet", joined(name, at, tasks=(), endpoints=("demo.scores.rank",)))
    drive.stored("b", PROMPTS[0])
    first = called(drive, "first", sequence_hashes=pack_u64(PROMPTS[0]), token_ids=pack_u32([7] * 4 * len(PROMPTS[0])))
    assert first.worker_id == "b"
    drive.lose("b")
    assert drive.active("first").worker_id == "a"


def test_a_queued_call_does_not_hold_calls_for_other_workers() -> None:
    drive, other = Driver(), RoutingHints(endpoint="demo.other.rank")
    drive("control", pool(queue=QueueConfig(threshold=0.1)))
    drive("fleet", joined("a", 0, endpoints=(RANK.endpoint,)))
    drive("fleet", joined("b", 1, endpoints=(other.endpoint,)))
    first, second = drive.ask("first", PROMPTS[1], worker_id="a"), drive.ask("second", PROMPTS[2], worker_id="b")
    assert isinstance(called(drive, "call"), RequestHeld)
    assert isinstance(called(drive, "next", other), RequestHeld)
    for ended, freed in ((second, "next"), (first, "call")):
        made = drive.finish(ended, output_tokens=1)
        assert [one.request_id for one in made if isinstance(one, RequestRouted)] == [freed]


def test_calls_differ_by_endpoint_and_payload() -> None:
    other = msgspec.structs.replace(RANK, endpoint="demo.scores.close")
    calls = [("a", RANK, "1"), ("a", RANK, "2"), ("a", other, "1"), ("a", RANK, "1")]
    hashes = [content_hash(request(name, task="call", routing=to, payload=given)) for name, to, given in calls]
    assert (len(set(hashes)), hashes[0]) == (3, hashes[3])


def shared_and_salted(**router: Any) -> Driver:
    drive = Driver()
    drive("control", pool(**router))
    drive("fleet", joined("shared", 0, salts_cache=False))
    drive("fleet", joined("salted", 1))
    return drive


def test_a_salted_request_goes_only_to_workers_that_separate_their_cache() -> None:
    drive = shared_and_salted()
    salted = ask(drive, cache_namespace="tenant")
    assert isinstance(salted, RequestRouted)
    assert (salted.worker_id, salted.candidates) == ("salted", 1)
    assert ask(drive, "plain").candidates == 2
    drive.lose("salted")
    refused = ask(drive, "other", cache_namespace="tenant")
    assert isinstance(refused, RequestRejected)
    assert refused.reason == "no_eligible_worker"
    assert refused.message == ("no ready worker of the pool default separates the cache of the request's namespace")
    assert ask(drive, "again").worker_id == "shared"


def test_a_queued_salted_request_waits_for_its_workers_only() -> None:
    """Also after a restore. A request without a namespace does not wait behind it."""
    drive = shared_and_salted(queue=QueueConfig(threshold=0.1))
    first = drive.ask("first", PROMPTS[1], cache_namespace="tenant")
    assert first.worker_id == "salted"
    assert isinstance(drive.ask("r", cache_namespace="tenant"), RequestHeld)
    for one in (drive, drive.copy()):
        plain = one.ask("plain", PROMPTS[2])
        assert plain.worker_id == "shared"
        assert isinstance(one.ask("next", PROMPTS[2]), RequestHeld)
        for ended, freed in ((plain, ("next", "shared")), (first, ("r", "salted"))):
            made = one.finish(ended, output_tokens=1)
            assert [(each.request_id, each.worker_id) for each in made if isinstance(each, RequestRouted)] == [freed]


def set_busy(drive: Driver, model: str = "m", **thresholds: Any) -> None:
    drive("control", BusyThresholdsSet(model=model, thresholds=BusyThresholds(**thresholds)))


@pytest.mark.parametrize(
    ("thresholds", "reports"),
    [
        ({"active_prefill_tokens_threshold": 13}, False),
        ({"active_prefill_tokens_threshold_frac": 0.2}, False),  # of 64
        ({"active_decode_blocks_threshold": 2 / 64}, False),
        ({"active_decode_blocks_threshold": 0.5}, True),
        ({"active_decode_blocks_threshold": 0.5, "active_prefill_tokens_threshold": 99}, True),
    ],
)
def test_a_worker_above_any_threshold_is_passed_over_and_all_busy_is_refused(
    thresholds: dict[str, Any], reports: bool
) -> None:
    drive = Driver().fleet("a", "b")
    set_busy(drive, **thresholds)
    for name in ("a", "b"):
        if reports:
            drive.report(name, used=33)
        else:
            assert ask(drive, f"on-{name}", blocks=3, worker_id=name).worker_id == name
        if name == "a":
            routed = ask(drive, "small")
            assert (routed.worker_id, routed.candidates) == ("b", 1)
            assert ask(drive, "pinned", worker_id="a").reason == "busy"
    refused = ask(drive, "one more")
    assert (refused.reason, drive.world.counts["rejected_busy"]) == ("busy", 2)
    assert "every eligible worker of the pool default" in refused.message
    set_busy(drive)
    assert isinstance(ask(drive, "and another"), RequestRouted)


def test_a_rank_at_the_threshold_is_not_busy() -> None:
    drive = Driver().fleet("a")
    set_busy(drive, active_prefill_tokens_threshold=14)
    ask(drive, "r1", blocks=3)
    assert isinstance(ask(drive, "r2", blocks=3), RequestRouted)


def test_thresholds_stand_until_the_pool_is_configured_anew_and_are_those_of_a_model() -> None:
    drive = Driver().fleet("a", busy=BusyThresholds(active_prefill_tokens_threshold=0))
    ask(drive, "r1")
    assert ask(drive, "r2").reason == "busy"
    set_busy(drive, model="other", active_prefill_tokens_threshold=99)
    assert ask(drive, "r3").reason == "busy"
    set_busy(drive, active_prefill_tokens_threshold=99)
    assert isinstance(ask(drive, "r4"), RequestRouted)
    drive("control", pool(busy=BusyThresholds(active_prefill_tokens_threshold=1)))
    assert ask(drive, "r5").reason == "busy"


def finish(drive: Driver, routed: RequestRouted) -> None:
    drive.emit(FirstTokenEmitted, routed)
    drive.finish(routed)


def load_up(drive: Driver, worker_id: str) -> None:
    for number in range(5):
        ask(drive, f"load-{worker_id}-{number}-{drive.now_us}", blocks=8, worker_id=worker_id)


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_a_session_stays_with_its_worker(mode: str) -> None:
    drive = Driver().fleet("a", "b", "c", session_ttl_s=1.0, session_mode=mode)
    first = ask(drive, "r1", session_id="s", worker_id="b")
    load_up(drive, "b")
    assert ask(drive, "other", session_id="other").worker_id != "b"
    again = ask(drive, "r2", session_id="s")
    assert (again.worker_id, again.candidates) == (first.worker_id, 1)
    assert ask(drive, "r3", session_id="s", worker_id="c").worker_id == "c", "a worker that is named comes first"
    assert ask(drive, "r4", session_id="s").worker_id == "c", "and is the session's from then on"


def test_a_session_ends_after_its_time_and_with_its_worker() -> None:
    drive = Driver().fleet("a", "b", session_ttl_s=1.0)
    ask(drive, "r1", session_id="s", worker_id="b")
    drive.now_us += 900_000
    assert ask(drive, "r2", session_id="s").candidates == 1
    drive.now_us += 900_000
    assert ask(drive, "r3", session_id="s").candidates == 1, "each use prolongs it"
    drive.now_us += 1_000_000
    assert ask(drive, "r4", session_id="s").candidates == 2
    finish(drive, ask(drive, "r5", session_id="t", worker_id="b"))
    drive.lose("b")
    drive("fleet", joined("b", 1))
    assert ask(drive, "r6", session_id="t").candidates == 2


def test_a_session_moves_on_from_a_worker_that_is_leaving() -> None:
    drive = Driver().fleet("a", "b", session_ttl_s=1.0)
    ask(drive, "r1", session_id="s", worker_id="b")
    drive.fact(WorkerDraining, "b")
    drive("fleet", joined("c", 2))
    moved = ask(drive, "r2", session_id="s")
    assert moved.candidates == 2
    assert ask(drive, "r3", session_id="s").worker_id == moved.worker_id


def test_sessions_count_only_where_they_are_configured() -> None:
    drive = Driver().fleet("a", "b")
    ask(drive, "r1", session_id="s", worker_id="b")
    assert ask(drive, "r2", session_id="s").candidates == 2


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_hard_sessions_wait_and_soft_sessions_leave_busy_workers(mode: str) -> None:
    drive = Driver().fleet("a", "b", session_ttl_s=1.0, session_mode=mode)
    ask(drive, "r1", session_id="s", worker_id="b")
    set_busy(drive, active_prefill_tokens_threshold=20)
    load_up(drive, "b")
    made = ask(drive, "r2", session_id="s")
    if mode == "hard":
        assert made.reason == "busy"
        return
    assert (made.worker_id, made.candidates) == ("a", 1)
    set_busy(drive)
    assert ask(drive, "r3", session_id="s").worker_id == "b", "it is still the session's worker"


def test_an_embedding_request_ends_without_a_first_token() -> None:
    """Its prompt is load until its end, which lets the next one go."""
    drive = Driver().fleet("a", "b", queue=QueueConfig(threshold=0.5))
    drive("fleet", joined("e", 7, tasks=("generate", "embed")))
    first = ask(drive, "r1", 8, task="embed")
    assert (type(first), first.worker_id) == (RequestRouted, "e")
    assert isinstance(ask(drive, "r2", 8, task="embed"), RequestHeld)
    load = drive.world.load.rank_load("e", 0)
    assert load.prefill_tokens > 0
    (second,) = drive.finish(first, output_tokens=0)
    assert (second.request_id, second.worker_id) == ("r2", "e")
    assert drive.finish(second) == []
    assert (load.prefill_tokens, load.decode_blocks, load.active_requests) == (0, 0, 0)
    assert len(drive.world.requests) == 0


# Attempts that workers reject


SECOND_US = 1_000_000
WORKERS = ("a", "b", "c")
PROMPT = PROMPTS[0]


def assumed_fleet(*names: str) -> Driver:
    """Return workers whose caches the owner assumes."""
    return Driver().fleet(*names, use_kv_events=False)


def ask_long(drive: Driver, name: str, prompt: Any = PROMPT, **changes: Any) -> Any:
    return drive.ask(name, prompt, timeout_us=10**10, **changes)


def reject(drive: Driver, routed: RequestRouted, after_s: int = 0, **fields: Any) -> Any:
    error: dict[str, Any] = {"error": "not now", "status": 503, "code": "engine_overloaded"} | fields
    return drive.emit(AttemptRejected, routed, retry_after_s=after_s, **error)[-1]


def overlap(drive: Driver, worker_id: str, prompt: Any = PROMPT) -> int:
    """Return how many blocks of a prompt the owner assumes a worker to have cached."""
    return drive.world.routed.depths(list(prompt)).get((worker_id, 0), 0)


def test_a_rejected_request_goes_to_each_other_worker_once_and_then_its_client_gets_the_error() -> None:
    drive = assumed_fleet(*WORKERS)
    first = ask_long(drive, "r")
    second = reject(drive, first)
    third = reject(drive, second)
    assert {first.worker_id, second.worker_id, third.worker_id} == set(WORKERS)
    end = reject(drive, third, error="the last one", status=429, code="slow_down", after_s=7)
    assert isinstance(end, RequestAborted)
    assert (end.reason, end.message) == ("worker_refused", "the last one")
    assert (end.status, end.code, end.retry_after_s) == (429, "slow_down", 7)
    assert len(drive.world.requests) == 0


def test_a_rejected_request_does_not_return_to_the_worker_that_has_its_prompt_cached() -> None:
    drive = assumed_fleet(*WORKERS)
    cached = ask_long(drive, "known")
    finish(drive, cached)
    first = ask_long(drive, "r")
    assert first.worker_id == cached.worker_id
    assert reject(drive, first).worker_id != cached.worker_id


def test_the_number_of_attempts_is_bounded() -> None:
    drive = assumed_fleet("a", "b", "c", "d", "e")
    last = ask_long(drive, "r")
    for _ in range(2):
        last = reject(drive, last)
    assert last.attempt == 3
    assert isinstance(reject(drive, last), RequestAborted)


def test_a_pinned_request_ends_with_the_error_of_its_worker() -> None:
    drive = assumed_fleet(*WORKERS)
    routed = ask_long(drive, "r", worker_id="b")
    assert isinstance(reject(drive, routed), RequestAborted)


ENDS: dict[str, Callable[[Driver, RequestRouted], object]] = {
    "rejected": reject,
    "failed": lambda drive, routed: drive.emit(RequestFailed, routed, error="broken"),
    "cancelled": lambda drive, routed: drive.cancel(routed.request_id),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_prompt_that_was_not_computed_is_not_assumed_to_be_cached(end: Callable[..., object]) -> None:
    drive = assumed_fleet("a")
    finish(drive, ask_long(drive, "known", PROMPT[:3]))
    kept = overlap(drive, "a")
    assert kept > 0
    routed = ask_long(drive, "r")
    assert overlap(drive, "a") > kept
    end(drive, routed)
    assert overlap(drive, "a") == kept, "what the worker has computed before is still cached"


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_prompt_that_was_computed_stays_cached_however_the_response_ends(end: str) -> None:
    drive = assumed_fleet("a")
    routed = ask_long(drive, "r")
    drive.emit(FirstTokenEmitted, routed)
    before = overlap(drive, "a")
    ENDS[end](drive, routed)
    assert overlap(drive, "a") == before > 0


def test_a_response_without_tokens_has_a_computed_prompt() -> None:
    drive = assumed_fleet("a")
    drive.finish(ask_long(drive, "r"))
    before = overlap(drive, "a")
    reject(drive, ask_long(drive, "r2"))
    assert overlap(drive, "a") == before > 0


def test_a_prompt_counts_again_once_a_second_request_with_it_is_computed() -> None:
    drive = assumed_fleet("a")
    first, second = ask_long(drive, "r1"), ask_long(drive, "r2")
    before = overlap(drive, "a")
    reject(drive, first)
    assert overlap(drive, "a") == 0
    finish(drive, second)
    assert overlap(drive, "a") == before


def test_a_failed_remote_prefill_is_not_assumed_to_be_cached() -> None:
    drive = Driver().disagg(["p"], ["d"])
    drive("control", prefill_pool(use_kv_events=False))
    routed = ask_long(drive, "r")
    assert (routed.stage, routed.worker_id) == ("prefill", "p")
    assert overlap(drive, "p") > 0
    drive.emit(PrefillFailed, routed, error="no room")
    last = next(one for one in reversed(drive.decided) if isinstance(one, RequestRouted))
    assert last.attempt > routed.attempt or last.worker_id != "p"
    drive.cancel("r")
    assert overlap(drive, "p") == 0


def avoided(drive: Driver, rounds: int = 3) -> set[str]:
    """Return the workers that get none of some new requests with other prompts."""
    workers = {one.spec.worker_id for one in drive.world.fleet.workers()}
    probes = [
        ask_long(drive, f"probe-{drive.now_us}-{number}", [900 + number]) for number in range(rounds * len(workers))
    ]
    for routed in probes:
        drive.cancel(routed.request_id)
    return workers - {routed.worker_id for routed in probes}


def test_a_worker_that_rejects_repeatedly_is_avoided_for_some_seconds() -> None:
    drive = assumed_fleet("a", "b")
    for number in range(2):
        routed = ask_long(drive, f"r{number}", [500 + number], worker_id="a")
        reject(drive, routed)
        assert avoided(drive) == ({"a"} if number else set())
    drive.wait(SECOND_US)
    assert avoided(drive) == set()


def test_a_computed_prompt_ends_a_row_of_rejections() -> None:
    drive = assumed_fleet("a", "b")
    for number in range(4):
        routed = ask_long(drive, f"r{number}", [500 + number], worker_id="a")
        reject(drive, routed)
        finish(drive, ask_long(drive, f"ok{number}", [600 + number], worker_id="a"))
        assert avoided(drive) == set()


@pytest.mark.parametrize(("asked_s", "pause_s"), [(5, 5), (10**6, AVOIDED_S_MAX)])
def test_a_worker_that_asks_for_a_pause_gets_it_within_a_bound(asked_s: int, pause_s: int) -> None:
    drive = assumed_fleet("a", "b")
    reject(drive, ask_long(drive, "r", worker_id="a"), after_s=asked_s)
    drive.wait(pause_s * SECOND_US - 10_000)
    assert avoided(drive) == {"a"}
    drive.wait(10_000)
    assert avoided(drive) == set()


def test_avoided_workers_still_get_requests_that_no_other_worker_may_take() -> None:
    drive = assumed_fleet("a")
    reject(drive, ask_long(drive, "r"), after_s=9)
    assert isinstance(ask_long(drive, "r2"), RequestRouted)
    drive("fleet", joined("b", 1))
    assert ask_long(drive, "r3").worker_id == "b"
    assert ask_long(drive, "r4", worker_id="a").worker_id == "a"


def test_a_request_returns_to_the_worker_that_rejected_it_if_the_others_are_lost() -> None:
    drive = assumed_fleet("a", "b")
    first = ask_long(drive, "r")
    second = reject(drive, first)
    (third,) = drive.lose(second.worker_id)
    assert (third.worker_id, third.attempt) == (first.worker_id, 3)


def test_another_pool_of_the_model_takes_what_all_workers_of_a_pool_reject() -> None:
    drive = assumed_fleet("a")
    drive("control", msgspec.structs.replace(pool(), pool="other"))
    drive("fleet", joined("b", 0, pool="other"))
    first = ask_long(drive, "r")
    second = reject(drive, first)
    assert {first.worker_id, second.worker_id} == {"a", "b"}
    assert first.pool != second.pool
    assert isinstance(reject(drive, second), RequestAborted)


def test_requests_wait_for_the_other_workers_while_one_is_avoided() -> None:
    drive = Driver().fleet("a", "b", queue=QueueConfig(threshold=0.5))
    reject(drive, ask_long(drive, "r", worker_id="a"), after_s=9)
    assert ask_long(drive, "r2").worker_id == "b"
    assert isinstance(ask_long(drive, "r3"), RequestHeld)
    (routed,) = drive.wait(9 * SECOND_US)
    assert (routed.request_id, routed.worker_id) == ("r3", "a")


outcomes = st.lists(
    st.tuples(st.sampled_from(["reject", "accept", "ask", "wait", "cancel"]), st.integers(0, 9), st.integers(0, 40)),
    max_size=60,
)


@given(outcomes)
def test_no_request_is_sent_twice_to_a_worker_that_rejected_it_while_there_is_another(history: list[Any]) -> None:
    drive = assumed_fleet(*WORKERS)
    sent: dict[str, list[str]] = {}
    for number, (kind, which, value) in enumerate(history):
        on_worker = [one for one in drive.world.requests.active() if one.on_worker]
        if kind == "ask":
            ask_long(drive, f"r{number}", PROMPTS[which % len(PROMPTS)])
        elif kind == "wait":
            drive.wait(value * SECOND_US)
        elif on_worker:
            one = on_worker[which % len(on_worker)]
            if kind == "cancel":
                drive.cancel(one.submitted.request_id)
                continue
            name = one.submitted.request_id
            if kind == "accept":
                drive.emit(FirstTokenEmitted, name)
            else:
                drive.emit(AttemptRejected, name, error="no", status=429, code="x", retry_after_s=value % 7)
        drive.world.take_consumed()
        assert restore(drive.world.snapshot()).digest() == drive.world.digest()
    for decided in drive.decided:
        if isinstance(decided, RequestRouted):
            sent.setdefault(decided.request_id, []).append(decided.worker_id)
    assert all(len(workers) == len(set(workers)) <= len(WORKERS) for workers in sent.values())
