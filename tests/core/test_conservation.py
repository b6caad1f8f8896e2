"""Nothing is lost or counted twice: redeliveries, ends, bookings, clock runs, and every fact of a snapshot."""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.core.rederive import Rederivation
from forebay.core.restore import digest_of_snapshot, restore
from forebay.core.routing.cost import CostTable, cost_table
from forebay.core.routing.plan import Plan, StageCandidates
from forebay.core.routing.policies import BUILT_IN
from forebay.core.selection.counterfactual import counterfactual
from forebay.core.selection.evaluation import demand_of, find_overlaps
from forebay.core.state.rank_load import LOWER_TIERS, LoadColumns
from forebay.core.step import CLOCK, InputEvent, advance
from forebay.core.world import World
from forebay.events.base import pack_u64
from forebay.events.codec import decode, encode
from forebay.events.control import (
    BusyThresholds,
    BusyThresholdsSet,
    Command,
    DisaggConfig,
    DisaggregationSet,
    PolicySet,
    PoolConfigured,
    Role,
)
from forebay.events.decisions import (
    CommandEnded,
    CommandSent,
    ConsumedRun,
    JournalRecord,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRepeated,
    RequestRouted,
    RouteAnswered,
)
from forebay.events.fleet import IngressJoined
from forebay.events.kv import BlocksRemoved, StoreBlocksAdded
from forebay.events.metrics import TierCost, TierCosts, TierCostsMeasured
from forebay.events.pools import PoolCanarySet, PoolDrainSet, PoolRouting, PoolRoutingConfigured
from forebay.events.progress import FirstTokenEmitted, OutputGrown, RequestFailed, RequestFinished
from forebay.events.requests import NO_HINTS, RequestSubmitted, RoutingHints
from forebay.events.snapshots import Booking, Chunk, IndexChanges, SnapshotChunk, StoreDropped, WorldState
from forebay.events.topics import SNAPSHOTS
from forebay.events.transfer import Prefilled
from forebay.events.versions import EVENTS_VERSION
from tests.core.worlds import (
    BLOCK,
    ENCODED,
    PROMPTS,
    QUEUE,
    Driver,
    Recorded,
    actions,
    commanded,
    decode_pool,
    depths_by_rank,
    disagg_policy_of,
    histories,
    joined,
    may_go,
    obeyed,
    one_cell,
    perform_all,
    pool,
    prefill_pool,
    request,
)

UNCHANGED = RequestRejected | RequestRepeated | RouteAnswered | CommandSent  # decisions that change no state


class Careful(Driver):
    """A driver that keeps the books itself: clock runs, ends reported by workers, and each event twice on demand."""

    def __init__(self, *, twice: bool = False) -> None:
        super().__init__()
        self.order: list[tuple[str, int]] = []
        self.finished = 0
        self.twice = twice

    def __call__(self, topic: str, event: InputEvent | None, after_us: int = 10) -> list[Any]:
        made = self._once(topic, event, after_us)
        if self.twice:
            before = state(self.world)
            again = self._once(topic, event, 0)
            assert state(self.world) == before
            assert all(isinstance(one, UNCHANGED) for one in again)
        return made

    def wait(self, us: int) -> list[Any]:
        self._note_clock(us)
        return super().wait(us)

    def _once(self, topic: str, event: InputEvent | None, after_us: int) -> list[Any]:
        self._note_clock(after_us)
        before = len(self.world.requests)
        made = super().__call__(topic, event, after_us)
        self.order.append((topic, self.now_us))
        if isinstance(event, RequestFinished | RequestFailed):
            aborted = sum(isinstance(one, RequestAborted) for one in made)
            self.finished += before - aborted - len(self.world.requests)
        return made

    def _note_clock(self, after_us: int) -> None:
        due_us = self.world.next_due_us()
        if due_us is not None and due_us <= self.now_us + after_us:
            self.order.append((CLOCK, self.now_us + after_us))


def state(world: World) -> tuple[Any, ...]:
    return [machine.digest() for machine in world.machines()], world.settings.snapshot(), dict(world.turns)


def through_the_wire(world: World) -> list[Chunk]:
    chunk = SnapshotChunk(owner_epoch=0, number=0, parts=tuple(world.snapshot()))
    decoded: SnapshotChunk = decode(SNAPSHOTS, encode(SNAPSHOTS, chunk))
    return list(decoded.parts)


@given(histories)
def test_a_redelivered_event_changes_nothing(history: list[Any]) -> None:
    perform_all(Careful(twice=True).fleet("a", "b"), history)


@given(histories, st.sampled_from([{}, {"mode": "least-loaded"}, {"temperature": 3.0}, {"overlap_score_credit": 0.0}]))
def test_the_books_of_any_history_balance(history: list[Any], other: dict[str, Any]) -> None:
    drive = Careful()
    plans = ask_alternatives(drive.world, other)
    perform_all(drive.fleet("a", "b"), history)
    assert_requests_end_once(drive)
    assert_commands_end_once(drive.decided, {one.command_id for one in drive.world.commands.pending()})
    chosen = [one for one in drive.decided if isinstance(one, RequestRouted | RouteAnswered)]
    chosen = [one for one in chosen if isinstance(one, RequestRouted) or one.choice is not None]
    assert plans == [(one.request_id, getattr(one, "would_wait", False)) for one in chosen]
    records = [*drive.decided, advance(drive.world)]
    assert [record.seq for record in records] == list(range(len(records)))
    runs = [run for record in records for run in record.consumed]
    assert [(run.topic, run.now_us) for run in runs for _ in range(run.count or 1)] == drive.order
    assert_rederived(drive, records)
    for one in drive.world.requests.active():
        drive.cancel(one.submitted.request_id)
    drive.wait(10_000_000)
    assert len(drive.world.requests) == len(drive.world.commands) == 0
    for load in drive.world.load.ranks():
        assert (load.prefill_tokens, load.decode_blocks, load.active_requests) == (0, 0.0, 0)
    assert not [chunk for chunk in drive.world.load.snapshot() if isinstance(chunk, Booking)]


def ask_alternatives(world: World, router: dict[str, Any]) -> list[tuple[str, bool]]:
    """Ask at every choice what the same and another configuration would do. The list gets each choice made."""
    plans: list[tuple[str, bool]] = []

    def on_plan(plan: Plan) -> None:
        same = counterfactual(world, plan.pool, plan)
        assert (same.agrees, same.regret_blocks, same.refusal) == (True, 0.0, None)
        assert same.overlap_blocks == same.history_overlap_blocks
        assert cost_by_rank(world, plan).digest() == plan.table.digest()
        assert_columns_equal_loads(world)
        plans.append((plan.request.request_id, same.would_hold))
        changed = msgspec.structs.replace(plan.pool.router, **router)
        counterfactual(world, msgspec.structs.replace(plan.pool, router=changed), plan)

    world.on_plan = on_plan
    return plans


def cost_by_rank(world: World, plan: Plan) -> CostTable:
    """Compute the table of a plan with overlaps by rank instead of masks."""
    candidates = StageCandidates(plan.stage, plan.pool, plan.roster, plan.request, plan.attempt)
    overlaps = find_overlaps(world, plan.pool, plan.request.blocks)
    demand = msgspec.structs.replace(demand_of(world, candidates, plan.config), cached=(), overlaps=overlaps)
    return cost_table(plan.config, plan.pool.block_size, plan.roster, demand)


def assert_columns_equal_loads(world: World) -> None:
    for load in world.load.ranks():
        found = {name: getattr(load.columns, name)[load.slot] for name in LoadColumns.__annotations__}
        tier = LOWER_TIERS[found.pop("lower_tier")]
        assert (tier, found.pop("began_us")) == (load.next_tier, load.turnover_us[0])
        assert found == {name: getattr(load, name) for name in found}


def assert_requests_end_once(drive: Careful) -> None:
    began: list[str] = []
    held = {one.request_id for one in drive.decided if isinstance(one, RequestHeld)}
    for one in drive.decided:
        if isinstance(one, RequestHeld) or (
            isinstance(one, RequestRouted) and one.request_id not in held and one.request_id not in began
        ):
            began.append(one.request_id)
    submitted = {event.request_id for _, event, _ in drive.applied if isinstance(event, RequestSubmitted)}
    rejected = {one.request_id for one in drive.decided if isinstance(one, RequestRejected | RequestRepeated)}
    assert submitted <= rejected | set(began)
    aborted = [one.request_id for one in drive.decided if isinstance(one, RequestAborted)]
    active = drive.world.requests.active()
    under_way = [one.submitted.request_id for one in active]
    assert not Counter(aborted + under_way) - Counter(began)
    assert len(began) == len(aborted) + len(under_way) + drive.finished
    assert sum(rank.active_requests for rank in drive.world.load.ranks()) == sum(one.on_worker for one in active)


def assert_commands_end_once(decided: list[Any], pending: set[str]) -> None:
    sent = Counter(one.command_id for one in decided if isinstance(one, CommandSent) and one.reason is None)
    ended = [one for one in decided if isinstance(one, CommandEnded)]
    assert sent == Counter(one.command_id for one in ended) + Counter(pending)
    assert all(outcome.status != "pending" for one in ended for outcome in one.outcomes)


def assert_rederived(drive: Driver, records: Sequence[JournalRecord]) -> None:
    """Assert that the recorded order of events leads to the same records and the same state."""
    followed, recorded = Rederivation(World()), Recorded(drive.applied)
    claimed = OwnerClaimed(owner_id="o", core_version=1, events_version=EVENTS_VERSION)
    for offset, record in enumerate([claimed, *records]):
        assert followed.apply(offset, record, recorded.events_of(record) if offset else {}) is None
    assert followed.world.digest() == drive.world.digest()
    assert not followed.pending


class Watchful(Driver):
    """After every event that can change it, nobody waits who may go."""

    def __call__(self, topic: str, event: InputEvent | None, after_us: int = 10) -> list[Any]:
        made = super().__call__(topic, event, after_us)
        world = self.world
        for waiting in world.requests.queued():
            session_id = waiting.submitted.hints.session_id
            # A session that ends by time lets its requests go with the next event that looks at the queue; so do
            # blocks that are cached, where the length of what is not decides.
            by_length = world.pools[waiting.submitted.pool].role == "decode" and disagg_policy_of(
                world, waiting
            ) not in (
                "always",
                "never",
            )
            if not by_length and (
                not session_id or world.sessions.find(waiting.submitted.pool, session_id) is not None
            ):
                assert not may_go(world, waiting)
        return made


@given(st.lists(actions().filter(lambda one: one[0] not in ("pool", "wait")), min_size=30, max_size=60))
def test_nobody_waits_who_may_go_and_the_winner_is_never_dearer_than_the_runner_up(history: list[Any]) -> None:
    drive = perform_all(Watchful().fleet("a", "b", queue=QUEUE, session_ttl_s=10.0), history)
    for routed in drive.decided:
        if isinstance(routed, RequestRouted) and routed.mode == "kv" and routed.runner_up is not None:
            assert routed.terms.cost <= routed.runner_up.terms.cost
            assert (routed.ties > 1) == (routed.terms.cost == routed.runner_up.terms.cost)
            assert (routed.worker_id, routed.rank) != (routed.runner_up.worker_id, routed.runner_up.rank)


@given(histories, st.integers(0, 60))
@example([("in_store", (0, 1, 0)), ("in_store", (1, 1, 0))], 60)  # the parts of two stores had another order
def test_a_snapshot_and_the_tail_give_the_whole_state(history: list[Any], cut: int) -> None:
    whole = perform_all(Driver().fleet("a", "b", "c"), history[:cut])
    advance(whole.world)
    parts = through_the_wire(whole.world)
    assert digest_of_snapshot(parts) == whole.world.digest()
    copy = Driver(restore(parts))
    copy.now_us = whole.now_us  # the clock is outside the world, which knows only when it last was read for a run
    assert copy.world.digest() == whole.world.digest()
    assert list(copy.world.snapshot()) == list(whole.world.snapshot())
    assert copy.world.next_due_us() == whole.world.next_due_us()
    for prompt in PROMPTS:
        assert depths_by_rank(copy.world.load, prompt) == depths_by_rank(whole.world.load, prompt)
        assert copy.world.routed.depths(prompt) == whole.world.routed.depths(prompt)
        assert copy.world.index.overlaps(prompt) == whole.world.index.overlaps(prompt)
    whole.decided.clear()
    for drive in (whole, copy):
        perform_all(drive, history[cut:], cut)
    assert copy.decided == whole.decided
    assert copy.world.digest() == whole.world.digest()


def test_a_snapshot_written_while_the_index_changes_is_of_the_state_at_its_end() -> None:
    drive = Driver().fleet("a", "b")
    for seq in range(1, 4):
        drive.stored("a", PROMPTS[seq - 1], seq)
    walk = drive.world.index.begin_scan()
    chunks: list[Chunk] = list(walk.advance(4))
    drive.stored("b", PROMPTS[0])
    gone = pack_u64(PROMPTS[0][4:])
    drive("kv-events", BlocksRemoved(worker_id="a", worker_epoch=drive.epoch("a"), seq=4, sequence_hashes=gone))
    drive("requests", request("r", PROMPTS[1]))
    while not walk.done:
        chunks += walk.advance(4)
    drive.world.take_consumed()
    whole = restore([*chunks, *drive.world.index.end_scan(), *drive.world.snapshot_small()])
    assert whole.digest() == drive.world.digest()
    assert whole.index.overlaps(PROMPTS[0]) == drive.world.index.overlaps(PROMPTS[0])


def disaggregate(drive: Driver) -> None:
    """Another model, and a request of it that is computed by one worker and answered by another."""
    for kind, name in ((prefill_pool(), "p"), (decode_pool(), "d")):
        drive("control", msgspec.structs.replace(kind, model="n", pool=f"n-{kind.role}"))
        drive("fleet", joined(name, 0, model="n", pool=f"n-{kind.role}", role=kind.role))
    drive("control", DisaggregationSet(model="n", disagg=DisaggConfig(policy="prefill_load")))
    prefill_and_decode(drive, "r6", "n")


def prefill_and_decode(drive: Driver, name: str, model: str) -> RequestRouted:
    """Submit a request whose prompt is computed remotely, up to its decode stage. Return its first routing."""
    sent = drive.ask(name, model=model)
    (routed,) = drive.prefilled(sent, model=model)
    assert (sent.stage, routed.stage) == ("prefill", "decode")
    return cast(RequestRouted, sent)


def choose_pools(drive: Driver) -> None:
    """A third model with a grid, a canary and a drain, and a request whose prompt a chosen pool computes."""
    roles: dict[str, Role] = {"z-a": "prefill", "z-b": "prefill", "z-c": "decode"}
    for name, role in roles.items():
        drive("control", PoolConfigured(pool=name, model="z", block_size=BLOCK, role=role))
        drive("fleet", joined(f"w-{name}", 0, model="z", pool=name, role=role))
    grid = one_cell("z-b", role="prefill")
    drive("control", PoolRoutingConfigured(model="z", routing=PoolRouting(grids=(grid,), retry=True)))
    drive("control", PoolCanarySet(model="z", pool="z-e", base="z-c", share=0.5))
    drive("control", PoolDrainSet(model="z", pool="z-d", drained=True))
    assert prefill_and_decode(drive, "r7", "z").pool == "z-b"


def eventful_world() -> World:
    drive = Driver(custom={"mine.Kv": BUILT_IN["kv"]})
    drive("control", pool(predicted_ttl_s=10.0, session_ttl_s=10.0, queue=QUEUE, track_output_blocks=True))
    drive("fleet", joined("a", 0, kv_store="s"))
    drive("fleet", joined("b", 1, kv_events=False))
    drive("fleet", IngressJoined(owner_epoch=0, ingress_id="i", incarnation="one", lease_ttl_ms=3_000))
    for seq, tier in ((1, "device"), (2, "host"), (4, "disk")):
        drive.stored("a", PROMPTS[seq % 3], seq, tier=tier)
    for store, worker_id in (("s", "a"), ("t", "b")):
        drive("kv-events", StoreBlocksAdded(store=store, worker_id=worker_id, sequence_hashes=pack_u64(PROMPTS[0])))
    costs = TierCosts(prefill_block_us=9.0, tiers=(TierCost(tier="store", fixed_us=3.0, block_us=2.0),))
    drive("metrics", TierCostsMeasured(worker_id="b", worker_epoch=drive.epoch("b"), costs=costs))
    drive.report("b", 1, 2, 3, kv_blocks_total=4)
    hints = RoutingHints(session_id="s", expected_output_tokens=40, worker_id="b", policy_class="batch")
    for name, prompt in (("r1", PROMPTS[0]), ("r2", PROMPTS[1]), ("r3", []), ("r4", PROMPTS[2]), ("r5", PROMPTS[2])):
        drive("requests", request(name, prompt, routing=hints if name != "r2" else NO_HINTS))
    drive.emit(FirstTokenEmitted, "r1")
    drive.emit(OutputGrown, "r1", output_tokens=5)
    drive.cancel("r3")
    drive.finish(drive.ask("r8", idempotency_key=8))
    drive.ask("r9", idempotency_key=9)
    drive("control", BusyThresholdsSet(model="m", thresholds=BusyThresholds(active_prefill_tokens_threshold=999)))
    drive("control", commanded("c1", "load_lora", lora_name="x", nonce=5))
    drive("progress", obeyed("c1", "a", drive.epoch("a"), "load_lora", "x"))
    drive("control", commanded("c2", worker_ids=("nobody",)))
    drive("control", commanded("c3", "load_lora", "x", lora_path="hf://o/x", placement="auto"))
    disaggregate(drive)
    choose_pools(drive)
    drive("control", PolicySet(model="z", pool="z-a", mode="round-robin"))
    advance(drive.world)
    return drive.world


EVENTFUL = list(eventful_world().snapshot())
# The journal itself has the first four. The digest of `content` covers `is_salted`.
NO_STATE = {
    ("WorldState", "owner_epoch"),
    ("WorldState", "owner_events"),
    ("WorldState", "owner_nonce"),
    ("WorldState", "seq"),
    ("RequestState", "is_salted"),
}
FACTS = [
    (at, field)
    for at, part in enumerate(EVENTFUL)
    for field in part.__struct_fields__
    if (type(part).__name__, field) not in NO_STATE
]


def changed(value: Any) -> Any:
    match value:
        case bytes():
            return value[:-1] + bytes([value[-1] ^ 1])
        case "prefill" | "decode" | "queued" | "transfer" as phase:
            return {"prefill": "decode", "decode": "prefill", "queued": "waiting", "transfer": "decode"}[phase]
        case "ready":
            return "draining"
        case "device" | "host" | "disk":
            return "host" if value == "disk" else "disk"
        case str():
            return value + "x"
        case bool():
            return not value
        case int():
            return value + 1
        case tuple():
            return value[:-1] if value else ("x",)
        case None:
            return ENCODED
        case RoutingHints():
            return msgspec.structs.replace(value, priority=7)
        case Prefilled():
            return msgspec.structs.replace(value, descriptor=b"elsewhere")
        case TierCosts():
            return msgspec.structs.replace(value, prefill_block_us=8.0)
        case Command():
            return msgspec.structs.replace(value, action="sleep")
        case _:
            return msgspec.structs.replace(value, engine="other")


@pytest.mark.parametrize(("at", "field"), FACTS, ids=str)
def test_the_digest_covers_every_fact_of_a_snapshot(at: int, field: str) -> None:
    part = EVENTFUL[at]
    other = msgspec.structs.replace(part, **{field: changed(getattr(part, field))})
    chunks: list[Chunk] = [*EVENTFUL[:at], other, *EVENTFUL[at + 1 :]]
    try:
        digest = restore(chunks).digest()
    except (KeyError, AssertionError):
        return  # it does not even fit in
    assert digest != restore(EVENTFUL).digest()


def test_the_eventful_world_has_every_kind_of_fact() -> None:
    # Changes are what happens while a snapshot is written; this one was written at once.
    assert {type(part) for part in EVENTFUL} == set(Chunk.__args__) - {IndexChanges, StoreDropped}
    assert isinstance(EVENTFUL[0], WorldState)


def test_an_id_that_comes_back_with_the_deadline_of_its_first_use_is_ended_once() -> None:
    drive = Driver().fleet("a")
    drive("requests", request("other", timeout_us=250_000_000))
    drive("requests", request("r", timeout_us=300_000_000, nonce=1))
    due_us = drive.now_us + 300_000_000
    drive.cancel("r")
    drive.wait(120_000_000)
    drive("requests", request("r", timeout_us=due_us - drive.now_us - 10, nonce=2))
    ended = drive.wait(400_000_000)
    assert [(type(one), one.request_id) for one in ended] == [(RequestAborted, "other"), (RequestAborted, "r")]


def test_a_recorded_clock_that_runs_backwards_is_a_divergence() -> None:
    drive = Driver().fleet("a")
    (routed,) = drive("requests", request("r", PROMPTS[0]))
    early = ConsumedRun(topic="requests", count=1, now_us=drive.now_us - 1)
    lie = msgspec.structs.replace(routed, consumed=(*routed.consumed, early))
    divergence = Rederivation(World()).apply(1, lie, {})
    assert divergence is not None
    assert (divergence.reason, divergence.derived) == ("the clock runs backwards", None)


@pytest.mark.parametrize(("length", "cached"), list(product((0, 1, 8), (0, 5, 8))))
def test_only_uncached_tokens_are_booked(length: int, cached: int) -> None:
    drive = Driver().fleet("a")
    drive.stored("a", PROMPTS[0][:cached])
    blocks = PROMPTS[0][:length]
    drive("requests", request("r", blocks))
    overlap = min(cached, len(blocks))
    load = drive.world.load.rank_load("a", 0)
    assert load.prefill_tokens == len(blocks) * BLOCK + 2 - overlap * BLOCK
    assert (load.decode_blocks, load.active_requests) == (len(blocks), 1)
