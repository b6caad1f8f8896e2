"""The choice of pools: grids, health, load, drains, canaries, sessions, retries, and what the journal records."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.routing.pool_choice import choose, draw_canary, prefer
from forebay.events.control import BusyThresholds, PoolConfigured, QueueConfig
from forebay.events.decisions import RequestAborted, RequestHeld, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerDraining, WorkerLost, WorkerSuspect
from forebay.events.pools import (
    GridPool,
    PoolCanarySet,
    PoolChoice,
    PoolDrainSet,
    PoolGrid,
    PoolRouting,
    PriorityOverride,
    SkipReason,
)
from forebay.events.progress import EncodeFinished, FirstTokenEmitted, PrefillFailed
from forebay.events.requests import RoutingHints
from tests.core.worlds import (
    BLOCK,
    ENCODED,
    MEDIA,
    ONE_EACH,
    PROMPTS,
    Driver,
    ids_of,
    joined,
    one_cell,
    pool_of,
    query,
    worker_of,
)
from tests.events.strategies import pool_grids


def skipped(made: Any) -> list[tuple[str, str]]:
    (choice,) = made.pools
    return [(one.pool, one.reason) for one in choice.skipped]


def test_without_rules_the_first_pool_by_name_serves_and_no_choice_is_recorded() -> None:
    drive = Driver().pools("b", "a")
    routed = drive.ask()
    assert (routed.pool, routed.pools) == ("a", ())
    assert isinstance(drive.ask("r2"), RequestHeld), "although the other pool has room"


def test_without_rules_a_pool_without_workers_is_passed_over() -> None:
    drive = Driver().pools("a", "b")
    drive.lose("w-a")
    routed = drive.ask()
    assert (routed.worker_id, routed.pools) == ("w-b", ())
    drive("fleet", worker_of("a"))
    assert drive.ask("r2").worker_id == "w-a"
    drive.lose("w-a")
    drive.lose("w-b")
    assert drive.ask("r3").reason == "no_workers"


def test_with_one_pool_no_choice_is_recorded_but_a_drain_counts() -> None:
    drive = Driver().pools("a")
    drive.rules(one_cell("a"))
    assert drive.ask().pools == ()
    drive.drain("a")
    refused = drive.ask("r2")
    assert isinstance(refused, RequestRejected)
    assert (refused.reason, refused.pools) == ("no_workers", ())
    assert refused.message == "no pool of m takes new requests; drained pools: a"


def test_rules_of_another_model_do_not_count() -> None:
    drive = Driver().pools("a", "b")
    drive("control", PoolDrainSet(model="n", pool="a", drained=True))
    assert drive.ask().pool == "a"


def test_the_grid_chooses_by_prompt_length_and_target() -> None:
    drive = Driver().pools("short", "long")
    grid = one_cell("short", "long", isl_max=40, cells=(("short",), ("long",)))
    drive.rules(grid)
    one, other = drive.ask("r1", PROMPTS[0][:2]), drive.ask("r2", PROMPTS[0])
    assert (one.pool, other.pool) == ("short", "long")
    assert one.pools == (
        PoolChoice(pool="short", role="aggregated", reason="grid", wanted="short", row=0, column=0, target_ms=50.0),
    )
    assert (other.pools[0].row, other.pools[0].reason) == (1, "grid")


def test_a_request_names_its_target() -> None:
    drive = Driver().pools("fast", "cheap")
    drive.rules(one_cell("fast", "cheap", target="itl", cells=(("fast", "cheap"),)))
    assert drive.ask("r1", itl_target_ms=10.0, ttft_target_ms=99.0).pool == "fast"
    assert drive.ask("r2", itl_target_ms=99.0).pool == "cheap"


def test_a_query_returns_the_choice() -> None:
    drive = Driver().pools("a", "b")
    drive.rules(one_cell("b"))
    (answered,) = drive("requests", query("q"))
    assert (answered.pool, [one.reason for one in answered.pools]) == ("b", ["grid"])
    drive("requests", query("q2"))
    (refused,) = drive("requests", query("q3", routing=RoutingHints(required_taints=("gpu",))))
    assert (refused.reason, skipped(refused)) == ("no_eligible_worker", [("a", "no_eligible_worker")])


@pytest.mark.parametrize("kind", [WorkerLost, WorkerSuspect, WorkerDraining])
def test_a_pool_without_ready_workers_is_skipped(kind: Any) -> None:
    drive = Driver().pools("slow", "fast")
    drive.rules(one_cell("fast"))
    drive.fact(kind, "w-fast")
    routed = drive.ask()
    assert (routed.pool, routed.pools[0].wanted) == ("slow", "fast")
    assert skipped(routed) == [("fast", "no_workers")]


def test_a_full_pool_gives_requests_to_a_faster_one_but_not_to_a_slower_one() -> None:
    drive = Driver().pools("slow", "fast", "slower")
    drive.rules(one_cell("slow", "fast"))
    assert [drive.ask(name).pool for name in ("r1", "r2")] == ["slow", "fast"]
    held = drive.ask("r3")
    assert isinstance(held, RequestHeld)
    assert (held.pool, skipped(held)) == ("slow", [("fast", "full")])
    first = next(one for one in drive.decided if isinstance(one, RequestRouted))
    (served,) = drive.finish(first)
    assert (served.request_id, served.pool, served.pools) == ("r3", "slow", ()), "the choice is in RequestHeld"


def test_a_busy_pool_and_one_without_eligible_workers_are_skipped() -> None:
    drive = Driver().pools("a", "b", "c", busy=BusyThresholds(active_prefill_tokens_threshold=0))
    drive("fleet", worker_of("d", loras=("sql",)))
    drive("control", pool_of("d"))
    assert drive.ask().pool == "a"
    drive.rules()
    routed = drive.ask("r2", lora_name="sql")
    assert (routed.pool, skipped(routed)) == (
        "d",
        [("a", "no_eligible_worker"), ("b", "no_eligible_worker"), ("c", "no_eligible_worker")],
    )
    assert skipped(drive.ask("r3")) == [("a", "busy")]


def test_if_all_pools_refuse_the_reason_is_that_of_the_preferred_pool() -> None:
    drive = Driver().pools("a", "b", busy=BusyThresholds(active_prefill_tokens_threshold=0))
    drive.rules(one_cell("b"))
    drive.ask("r1")
    drive.ask("r2")
    refused = drive.ask("r3")
    assert (refused.reason, refused.message) == ("busy", "every eligible worker of the pool b is busy")
    assert skipped(refused) == [("a", "busy")]


def test_a_request_waits_for_the_suspect_worker_of_its_only_pool_with_workers() -> None:
    drive = Driver().pools("a", "b")
    drive.rules(one_cell("b"))
    drive.lose("w-a")
    drive.fact(WorkerSuspect, "w-b")
    held = drive.ask()
    assert isinstance(held, RequestHeld)
    assert (held.pool, skipped(held)) == ("b", [("a", "no_workers")])


def test_the_queue_threshold_and_rooms_for_accepted_requests_count_as_full() -> None:
    drive = Driver().pools("a", "b", queue=QueueConfig(threshold=0.0))
    drive.rules()
    assert [drive.ask(name).pool for name in ("r1", "r2")] == ["a", "b"]


def test_pools_of_another_block_size_role_or_model_are_not_used() -> None:
    drive = Driver().pools("a")
    drive("control", pool_of("b", block_size=8))
    drive("fleet", worker_of("b", block_size=8))
    drive.rules(one_cell("b", "c"))
    routed = drive.ask()
    assert (routed.pool, skipped(routed)) == ("a", [("b", "block_size"), ("c", "unknown")])


def test_the_block_size_is_that_of_the_pools_with_workers() -> None:
    drive = Driver().pools("b")
    drive("control", pool_of("a", block_size=8))
    drive.rules()
    routed = drive.ask()
    assert (routed.pool, skipped(routed)) == ("b", [("a", "block_size")])


def test_a_drained_pool_gets_no_new_requests_and_finishes_those_it_has() -> None:
    drive = Driver().pools("a", "b")
    drive.rules(one_cell("a"))
    first = drive.ask("r1")
    drive.drain("a")
    routed = drive.ask("r2")
    assert (routed.pool, skipped(routed)) == ("b", [("a", "drained")])
    drive.finish(first)
    assert drive.ask("r3").pool == "b"
    drive("control", pool_of("a"))
    assert isinstance(drive.ask("r4"), RequestHeld), "a new configuration does not end a drain"
    drive.drain("a", drained=False)
    assert drive.ask("r5").pool == "a"


def test_a_canary_takes_its_share() -> None:
    drive = Driver().pools("a", "b")
    drive.canary("b", "a")
    routed = drive.ask("r1")
    assert (routed.pool, routed.pools[0].reason, routed.pools[0].base) == ("b", "canary", "a")
    drive.canary("b", "")
    routed = drive.ask("r2")
    assert (routed.pool, routed.pools) == ("a", ()), "the last rule is gone"


def test_a_request_that_names_a_worker_goes_to_the_pool_of_that_worker() -> None:
    drive = Driver().pools("a", "b")
    drive.rules(one_cell("a"))
    routed = drive.ask(worker_id="w-b")
    assert (routed.worker_id, routed.pools[0].reason) == ("w-b", "worker")
    held = drive.ask("r2", worker_id="w-b")
    assert (type(held), held.pool) == (RequestHeld, "b")
    assert drive.ask("r3", worker_id="nobody").message == "the pool a has no worker nobody"
    drive.drain("b")
    assert "drained pools: b" in drive.ask("r4", worker_id="w-b").message


@pytest.mark.parametrize(("mode", "again"), [("hard", RequestHeld), ("soft", RequestRouted)])
def test_a_session_keeps_its_pool(mode: Any, again: type) -> None:
    drive = Driver().pools("a", "b", session_ttl_s=10.0, session_mode=mode)
    drive.canary("b", "a")
    assert drive.ask("r1", session_id="s").pools[0].reason == "canary"
    drive.canary("b", "a", 0.0)
    made = drive.ask("r2", session_id="s")
    assert (type(made), made.pools[0].reason, made.pools[0].wanted) == (again, "session", "b")
    assert made.pool == ("b" if again is RequestHeld else "a")
    drive.drain("b")
    drive.lose("w-a")
    drive("fleet", worker_of("a", slot=1))
    assert drive.ask("r3", session_id="s").pool == "a"


def test_a_session_of_a_lost_worker_or_of_a_pool_without_affinity_has_no_effect() -> None:
    drive = Driver().pools("a", "b", session_ttl_s=10.0)
    drive.rules(one_cell("b"))
    drive.ask("r1", session_id="s")
    drive("control", pool_of("b"))
    assert drive.ask("r2", session_id="s").pools[0].reason == "grid"
    drive("control", pool_of("b", session_ttl_s=10.0))
    drive.fact(WorkerSuspect, "w-b")
    assert drive.ask("r3", session_id="s").pools[0].reason == "grid"


def test_a_request_that_failed_before_its_first_token_moves_to_a_faster_pool() -> None:
    drive = Driver().pools("slow", "medium", "fast")
    drive("fleet", joined("spare", 1, pool="slow"))
    drive.rules(one_cell("slow", "medium", "fast"), retry=True)
    assert drive.ask().pool == "slow"
    worker = next(one for one in drive.decided if isinstance(one, RequestRouted)).worker_id
    (moved,) = drive.lose(worker)
    assert (moved.pool, moved.attempt, moved.pools[0].reason) == ("medium", 2, "retry")
    assert skipped(moved) == [("slow", "failed")]
    (again,) = drive.lose("w-medium")
    assert (again.pool, again.attempt, skipped(again)) == ("fast", 3, [("medium", "failed")])


@pytest.mark.parametrize(("retry", "begun"), [(False, False), (True, True)])
def test_otherwise_a_request_stays_in_its_pool(retry: bool, begun: bool) -> None:
    drive = Driver().pools("slow", "fast")
    drive("fleet", joined("spare", 1, pool="slow"))
    drive.rules(one_cell("slow", "fast"), retry=retry)
    routed = drive.ask()
    if begun:
        drive.emit(FirstTokenEmitted, routed)
    (again,) = drive.lose(routed.worker_id)
    assert (again.pool, again.pools) == ("slow", ())


def test_a_failed_request_stays_if_no_faster_pool_can_take_it() -> None:
    drive = Driver().pools("slow", "fast")
    drive("fleet", joined("spare", 1, pool="slow"))
    drive.rules(one_cell("slow", "fast"), retry=True)
    drive.drain("fast")
    (again,) = drive.lose(drive.ask().worker_id)
    assert (again.pool, again.pools) == ("slow", ())


@pytest.mark.parametrize("grids", [(), (one_cell("a", "c"),)])
def test_a_request_whose_pool_has_no_worker_left_moves(grids: tuple[PoolGrid, ...]) -> None:
    drive = Driver().pools("a", "b")
    drive.rules(*grids)
    assert drive.ask().pool == "a"
    (moved,) = drive.lose("w-a")
    assert (moved.pool, moved.pools[0].reason, skipped(moved)[0]) == ("b", "moved", ("a", "no_workers"))
    (ended,) = drive.finish(moved) or (None,)
    assert ended is None
    assert len(drive.world.requests) == 0


def test_a_waiting_request_moves_once_another_pool_can_take_it() -> None:
    drive = Driver().pools("a", "b")
    drive.rules()
    drive.ask()
    drive.drain("b")
    assert drive.lose("w-a") == []
    (moved,) = drive.drain("b", drained=False)
    assert (moved.pool, moved.attempt) == ("b", 2)


def test_a_pinned_request_is_not_moved() -> None:
    drive = Driver().pools("a", "b")
    drive.rules()
    drive.ask(worker_id="w-a")
    (aborted,) = drive.lose("w-a")
    assert isinstance(aborted, RequestAborted)


def test_a_request_that_was_encoded_stays_in_its_pool_while_it_can() -> None:
    drive = Driver().pools("a", "b")
    drive("control", PoolConfigured(pool="e", model="m", block_size=BLOCK, role="encode"))
    drive("fleet", joined("w-e", 0, pool="e", role="encode", kv_events=False))
    drive.rules(one_cell("a"))
    routed = drive.ask(media=(MEDIA,))
    assert (routed.stage, routed.pool, [one.pool for one in routed.pools]) == ("encode", "e", ["a"])
    drive.drain("a")
    (responding,) = drive.emit(EncodeFinished, routed, encoded=ENCODED)
    assert (responding.pool, responding.pools) == ("a", ())


def disagg(*prefillers: str, retry: bool = False) -> Driver:
    """Return a driver of the decode pool d and of prefill pools, of which each is faster than the one before."""
    drive = Driver().pools("d", role="decode", queue=QueueConfig())
    drive.pools(*prefillers, role="prefill")
    drive.rules(one_cell(*prefillers, role="prefill", isl_max=40), retry=retry)
    return drive


def test_the_prefill_grid_chooses_the_prefill_pool() -> None:
    drive = disagg("y", "x")
    routed = drive.ask()
    assert (routed.stage, routed.pool) == ("prefill", "y")
    assert [(one.role, one.pool, one.reason) for one in routed.pools] == [("prefill", "y", "grid")]
    assert drive.ask("r2").pool == "x", "y is full"


def test_both_choices_of_a_request_are_recorded() -> None:
    drive = disagg("y", "x")
    drive.pools("c", role="decode")
    drive.rules(one_cell("x", role="prefill"), one_cell("c", role="decode", target="itl"))
    routed = drive.ask()
    assert [(one.role, one.pool) for one in routed.pools] == [("decode", "c"), ("prefill", "x")]
    (decode,) = drive.prefilled(routed)
    assert (decode.stage, decode.pool, decode.pools) == ("decode", "c", ())


def test_a_failed_prefill_moves_to_a_faster_pool() -> None:
    drive = disagg("z", "y", "x", retry=True)
    routed = drive.ask()
    for pool, before in (("y", "z"), ("x", "y"), ("x", None)):
        failed = PrefillFailed(**ids_of(routed), error="out of blocks")
        (routed,) = drive("progress", failed)
        if before is None:
            assert routed.stage == "aggregated", "all attempts at a remote prefill are used up"
            continue
        assert (routed.pool, skipped(routed)) == (pool, [(before, "failed")])


def test_without_retry_a_failed_prefill_stays_in_its_pool() -> None:
    drive = disagg("y", "x")
    (routed,) = drive.emit(PrefillFailed, drive.ask(), error="out of blocks")
    assert (routed.stage, routed.pool) == ("prefill", "y")


@pytest.mark.parametrize(("drained", "reason"), [(("x", "y"), "no_prefill_worker"), (("x",), "always")])
def test_a_decode_worker_computes_the_prompt_if_all_prefill_pools_are_drained(
    drained: tuple[str, ...], reason: str
) -> None:
    drive = disagg("y", "x")
    for name in drained:
        drive.drain(name)
    routed = drive.ask()
    assert routed.prefill.reason == reason


def test_prefill_pools_without_workers_or_of_another_block_size_are_not_used() -> None:
    drive = disagg("y")
    drive("control", pool_of("x", "prefill", block_size=8))
    drive("fleet", worker_of("x", "prefill", block_size=8))
    routed = drive.ask()
    assert (routed.pool, routed.pools) == ("y", ())
    drive.lose("w-y")
    assert drive.ask("r2").prefill.reason == "no_prefill_worker"
    drive = Driver().pools("d", role="decode")
    drive.rules()
    assert drive.ask().prefill.reason == "no_prefill_worker"
    assert Driver().pools("d", role="decode").ask().prefill.reason == "no_prefill_worker"


# Queued requests of a pool that is drained or loses its workers


def queued(*grids: PoolGrid, names: tuple[str, ...] = ("a", "b")) -> tuple[Driver, list[RequestRouted]]:
    """Return pools whose workers run one request each, with r-a and r-b queued in the pool a."""
    drive = Driver().pools(*names)
    drive.rules(*(grids or (one_cell("a"),)))
    running = [drive.ask(f"on-{name}", worker_id=f"w-{name}") for name in names]
    assert all(isinstance(one, RequestRouted) for one in running)
    held = [drive.ask(name) for name in ("r1", "r2")]
    assert [(type(one), one.pool) for one in held] == [(RequestHeld, "a")] * 2
    return drive, running


def test_a_queued_request_of_a_drained_pool_moves_once_another_pool_has_room() -> None:
    drive, (_, on_b) = queued()
    assert drive.drain("a") == [], "the other pool has no room yet"
    (moved,) = drive.finish(on_b)
    assert (moved.request_id, moved.pool, moved.worker_id) == ("r1", "b", "w-b")
    (choice,) = moved.pools
    assert (choice.reason, choice.wanted, [(one.pool, one.reason) for one in choice.skipped]) == (
        "moved",
        "a",
        [("a", "drained")],
    )
    assert moved.waited_us > 0
    (second,) = drive.finish(moved)
    assert (second.request_id, second.pool) == ("r2", "b")
    drive.finish(second)
    assert drive.world.queues.waiting("a") == 0
    assert len(drive.world.requests) == 1


def test_a_queued_request_of_a_drained_pool_is_served_there_if_its_own_worker_is_free_first() -> None:
    drive, (on_a, _) = queued()
    drive.drain("a")
    (served,) = drive.finish(on_a)
    assert (served.request_id, served.pool, served.pools) == ("r1", "a", ())


def test_a_queued_request_moves_at_once_if_another_pool_has_room_when_the_drain_begins() -> None:
    drive, (_, on_b) = queued()
    assert drive.finish(on_b) == [], "a grid without faster pools keeps the request in its pool"
    (moved,) = drive.drain("a")
    assert (moved.request_id, moved.pool) == ("r1", "b")
    assert drive.drain("a", drained=False) == []
    assert drive.world.queues.waiting("a") == 1


def test_a_queued_request_moves_if_its_pool_loses_its_workers() -> None:
    drive, (_, on_b) = queued()
    drive.finish(on_b)
    moved = drive.lose("w-a")
    assert isinstance(moved[0], RequestAborted), "the request that names the worker ends"
    assert [(one.request_id, one.pool) for one in moved[1:]] == [("r1", "b")]
    assert [(one.pool, one.reason) for one in moved[1].pools[0].skipped] == [("a", "no_workers")]


def test_the_request_waits_in_its_pool_while_no_other_pool_can_take_it() -> None:
    drive, (on_a, on_b) = queued()
    drive.drain("b")
    drive.drain("a")
    assert drive.finish(on_b) == []
    (served,) = drive.finish(on_a)
    assert (served.request_id, served.pool) == ("r1", "a")


def test_a_request_that_names_a_worker_stays() -> None:
    drive, (on_a, on_b) = queued()
    assert isinstance(drive.ask("pinned", worker_id="w-a", strict_priority=1), RequestHeld)
    drive.drain("a")
    (moved,) = drive.finish(on_b)
    assert moved.request_id == "r1"
    (served,) = drive.finish(on_a)
    assert (served.request_id, served.pool) == ("pinned", "a")


def test_without_rules_a_queued_request_stays_in_the_pool_without_workers() -> None:
    drive = Driver().pools("a", "b")
    drive.ask("on-a")
    assert isinstance(drive.ask("r1"), RequestHeld)
    lost = drive.lose("w-a")
    assert lost == []
    assert drive.world.queues.waiting("a") == 1


@pytest.mark.parametrize("mode", ["none.Such"])
def test_a_moved_request_is_rejected_if_the_policy_of_the_other_pool_fails(mode: str) -> None:
    drive = Driver().pools("a")
    drive("control", pool_of("b", mode=mode))
    drive("fleet", worker_of("b"))
    drive.rules(one_cell("a"))
    drive.ask("on-a")
    assert isinstance(drive.ask("r1"), RequestHeld)
    (rejected,) = drive.drain("a")
    assert isinstance(rejected, RequestRejected)
    assert (rejected.reason, rejected.pools[0].pool) == ("policy_failed", "b")
    assert len(drive.world.requests) == 1


def test_the_limits_of_the_queue_still_apply_if_no_pool_takes_the_request() -> None:
    drive, _ = queued()
    drive.drain("a")
    made = drive.wait(round((ONE_EACH.timeout_s + 1) * 1e6))
    ended = {one.request_id: one.reason for one in made}
    assert {"r1", "r2"} <= ended.keys()
    assert {ended["r1"], ended["r2"]} <= {"queue_timeout", "queue_deadline"}


def test_a_queued_request_waits_for_a_suspect_worker() -> None:
    drive, (_, on_b) = queued()
    drive.finish(on_b)
    assert drive.fact(WorkerSuspect, "w-a") == []


# The choice as a function


NAMES = ("a", "b", "c", "d")
GRID = PoolGrid(
    isl_max=32_000,
    target_min_ms=0.0,
    target_max_ms=1_000.0,
    pools=tuple(GridPool(pool=name, priority=at) for at, name in enumerate("abc")),
    cells=(("a", "b"), ("b", "c")),
    overrides=(
        PriorityOverride(min_priority=5, max_priority=9, pool="c"),
        PriorityOverride(min_priority=5, max_priority=99, pool="a"),
    ),
)
hints = st.builds(
    RoutingHints,
    priority=st.integers(-3, 9),
    ttft_target_ms=st.none() | st.floats(0, 1e4),
    itl_target_ms=st.none() | st.floats(0, 1e4),
)
canaries = st.lists(
    st.builds(
        PoolCanarySet,
        model=st.just("m"),
        pool=st.sampled_from(NAMES[2:]),
        base=st.sampled_from(NAMES[:2]),
        share=st.floats(0, 1),
    ),
    max_size=2,
    unique_by=lambda one: one.pool,
)
reasons: Sequence[SkipReason | None] = (None, "full", "busy", "no_workers", "drained", "unknown")
availabilities = st.fixed_dictionaries({name: st.sampled_from(reasons) for name in NAMES})


def canary(pool: str, base: str, share: float) -> PoolCanarySet:
    return PoolCanarySet(model="m", pool=pool, base=base, share=share)


def chosen(found: dict[str, SkipReason] | None = None, **fields: Any) -> PoolChoice:
    """Choose among a, b and c of `GRID`, where `found` has the reasons of pools that cannot take the request."""
    rules: dict[str, Any] = {"grid": GRID, "names": ("a", "b", "c"), "canaries": (), "hints": RoutingHints(), **fields}
    preference = prefer(rules["grid"], rules["names"], rules["canaries"], 0, 7, rules["hints"])
    made = choose(preference, "aggregated", (found or {}).get)
    assert made is not None
    return made


@pytest.mark.parametrize(("priority", "pool"), [(5, "c"), (9, "c"), (10, "a"), (99, "a"), (4, "b"), (100, "b")])
def test_the_first_override_of_a_priority_wins(priority: int, pool: str) -> None:
    found = chosen(hints=RoutingHints(priority=priority))
    assert (found.pool, found.reason == "override", found.row is None) == (pool, pool != "b", pool != "b")


def test_a_canary_is_only_used_for_its_share_and_if_no_other_pool_is_left() -> None:
    with_canary: dict[str, Any] = {"grid": None, "canaries": (canary("a", "b", 0.0),)}
    made = chosen(**with_canary)
    assert (made.pool, made.reason) == ("b", "first")
    assert chosen(**with_canary, found={"b": "full", "c": "no_workers"}).pool == "b"
    assert chosen(**with_canary, found={"b": "drained", "c": "no_workers"}).pool == "a"
    assert chosen(**{**with_canary, "names": ("a",)}).pool == "a", "the only pool"


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, (1 << 64) - 1_001))
def test_shares_converge_and_a_larger_share_keeps_the_requests_of_a_smaller_one(
    one: float, other: float, start: int
) -> None:
    small, large = sorted((one, other))
    seeds = range(start, start + 1_000)
    few = {seed for seed in seeds if draw_canary("b", [canary("c", "b", small)], seed)}
    many = {seed for seed in seeds if draw_canary("b", [canary("c", "b", large)], seed)}
    assert few <= many
    assert len(few) / len(seeds) == pytest.approx(small, abs=0.1)


@given(pool_grids(NAMES[:3]) | st.none(), canaries, availabilities, hints, st.integers(0, 200), st.integers(0, 99))
def test_a_pool_that_can_take_a_request_is_always_found(
    grid: PoolGrid | None,
    rules: list[PoolCanarySet],
    found: dict[str, SkipReason | None],
    asked: RoutingHints,
    tokens: int,
    seed: int,
) -> None:
    preference = prefer(grid, NAMES, rules, tokens, seed, asked)
    tried = [*preference.names, *preference.others]
    assert sorted(tried) == sorted(NAMES), "each pool is tried once"
    assert prefer(grid, NAMES, rules, tokens, seed, asked) == preference
    made = choose(preference, "aggregated", found.__getitem__)
    can = [name for name in tried if found[name] in (None, "full")]
    assert (made is None) == (not can)
    if made is None:
        return
    assert made.pool in can
    assert all(found[one.pool] == one.reason for one in made.skipped)
    before = [name for name in preference.names if name in can]
    free = [name for name in before if found[name] is None]
    after = [name for name in preference.others if found[name] is None]
    assert made.pool == next(iter([*free, *before, *after, *can]))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"isl_min": 5, "isl_max": 5}, "isl_max is 5; it must be above isl_min, 5"),
        ({"target_max_ms": 0.0}, "target_max_ms is 0; it must be at least 0.001 above target_min_ms, 0"),
        ({"target_max_ms": float("nan")}, "target_max_ms must be a number"),
        ({"cells": ()}, "cells has 0 rows with no cells"),
        ({"cells": ((), ())}, "cells has 2 rows with 0 cells"),
        ({"cells": (("a",), ("a", "a"))}, "cells has 2 rows with 1 or 2 cells; expected 1 to 64 rows"),
        ({"cells": (("a",),) * 65}, "cells has 65 rows"),
        ({"cells": (("x",),)}, "the pool 'x' of a cell or override is missing in pools: a, b"),
        ({"pools": (GridPool(pool="a", priority=0),) * 2}, "pools must be at most 64 different pools, got 2"),
        ({"overrides": (PriorityOverride(min_priority=0, max_priority=1, pool="z"),)}, "the pool 'z' of a cell"),
        ({"overrides": (PriorityOverride(min_priority=0, max_priority=1, pool="a"),) * 65}, "too many overrides: 65"),
    ],
)
def test_an_invalid_grid_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="^" + text.replace("(", "\\(")):
        msgspec.structs.replace(one_cell("a", "b"), **fields)


def test_a_model_has_one_grid_per_role_and_a_share_is_at_most_one() -> None:
    grids = (one_cell("a"), one_cell("a", role="decode"))
    assert PoolRouting(grids=grids).grids == grids
    with pytest.raises(ValueError, match="duplicate grid for the role decode"):
        PoolRouting(grids=(*grids, one_cell("b", role="decode")))
    with pytest.raises(ValueError, match=r"share must be a number from 0 to 1, not 1\.5"):
        canary("a", "b", 1.5)
