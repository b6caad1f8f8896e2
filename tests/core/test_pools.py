"""The owner's choice of pools: health, load, drains, canaries, sessions, retries, and what the journal records."""

from typing import Any

import pytest

from forebay.core.restore import restore
from forebay.core.state.pool_registry import PoolRegistry
from forebay.events.control import (
    BusyThresholds,
    PoolConfigured,
    QueueConfig,
)
from forebay.events.decisions import RequestAborted, RequestHeld, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerDraining, WorkerLost, WorkerSuspect
from forebay.events.pools import (
    PoolCanarySet,
    PoolChoice,
    PoolDrainSet,
    PoolGrid,
    SkippedPool,
    SkipReason,
)
from forebay.events.progress import EncodeFinished, FirstTokenEmitted, PrefillFailed, RequestFinished
from forebay.events.requests import RoutingHints
from tests.core.disaggregated import prefilled, progress_fields
from tests.core.pool_rules import one_cell
from tests.core.several_pools import add_pools, drain, pool_of, rules, set_canary, worker_of
from tests.core.worlds import BLOCK, ENCODED, MEDIA, PROMPTS, Driver, joined, query, request


def pools(*names: str, **fields: Any) -> Driver:
    return add_pools(Driver(), *names, **fields)


def ask(drive: Driver, name: str = "r", tokens: int = 10, **fields: Any) -> Any:
    hints = {key: fields.pop(key) for key in list(fields) if key in RoutingHints.__struct_fields__}
    (made,) = drive("requests", request(name, PROMPTS[0][: tokens // BLOCK], routing=RoutingHints(**hints), **fields))
    return made


def lose(drive: Driver, worker: str) -> list[Any]:
    return drive("fleet", WorkerLost(owner_epoch=0, worker_id=worker, worker_epoch=drive.epoch(worker)))


def skips(*found: tuple[str, SkipReason]) -> tuple[SkippedPool, ...]:
    return tuple(SkippedPool(pool=pool, reason=reason) for pool, reason in found)


def skipped(made: Any) -> list[tuple[str, str]]:
    (choice,) = made.pools
    return [(one.pool, one.reason) for one in choice.skipped]


# Without rules


def test_without_rules_the_first_pool_by_name_serves_and_no_choice_is_recorded() -> None:
    drive = pools("b", "a")
    routed = ask(drive)
    assert (routed.pool, routed.pools) == ("a", ())
    assert isinstance(ask(drive, "r2"), RequestHeld), "although the other pool has room"


def test_without_rules_a_pool_without_workers_is_passed_over() -> None:
    drive = pools("a", "b")
    lose(drive, "w-a")
    routed = ask(drive)
    assert (routed.worker_id, routed.pools) == ("w-b", ())
    drive("fleet", worker_of("a"))
    assert ask(drive, "r2").worker_id == "w-a"
    lose(drive, "w-a")
    lose(drive, "w-b")
    assert ask(drive, "r3").reason == "no_workers"


def test_with_one_pool_no_choice_is_recorded_but_a_drain_counts() -> None:
    drive = pools("a")
    rules(drive, one_cell("a"))
    assert ask(drive).pools == ()
    drain(drive, "a")
    refused = ask(drive, "r2")
    assert isinstance(refused, RequestRejected)
    assert (refused.reason, refused.pools) == ("no_workers", ())
    assert refused.message == "no pool of m takes new requests; drained pools: a"


def test_rules_of_another_model_do_not_count() -> None:
    drive = pools("a", "b")
    drive("control", PoolDrainSet(model="n", pool="a", drained=True))
    assert ask(drive).pool == "a"


# Grid


def test_the_grid_chooses_by_prompt_length_and_target() -> None:
    drive = pools("short", "long")
    grid = one_cell("short", "long", isl_max=40, cells=(("short",), ("long",)))
    rules(drive, grid)
    one, other = ask(drive, "r1", 8), ask(drive, "r2", 32)
    assert (one.pool, other.pool) == ("short", "long")
    assert one.pools == (
        PoolChoice(pool="short", role="aggregated", reason="grid", wanted="short", row=0, column=0, target_ms=50.0),
    )
    assert (other.pools[0].row, other.pools[0].reason) == (1, "grid")


def test_a_request_names_its_target() -> None:
    drive = pools("fast", "cheap")
    rules(drive, one_cell("fast", "cheap", target="itl", cells=(("fast", "cheap"),)))
    assert ask(drive, "r1", itl_target_ms=10.0, ttft_target_ms=99.0).pool == "fast"
    assert ask(drive, "r2", itl_target_ms=99.0).pool == "cheap"


def test_a_query_returns_the_choice() -> None:
    drive = pools("a", "b")
    rules(drive, one_cell("b"))
    (answered,) = drive("requests", query("q"))
    assert (answered.pool, [one.reason for one in answered.pools]) == ("b", ["grid"])
    drive("requests", query("q2"))
    (refused,) = drive("requests", query("q3", routing=RoutingHints(required_taints=("gpu",))))
    assert (refused.reason, skipped(refused)) == ("no_eligible_worker", [("a", "no_eligible_worker")])


# Health and load


@pytest.mark.parametrize("kind", [WorkerLost, WorkerSuspect, WorkerDraining])
def test_a_pool_without_ready_workers_is_skipped(kind: Any) -> None:
    drive = pools("slow", "fast")
    rules(drive, one_cell("fast"))
    drive("fleet", kind(owner_epoch=0, worker_id="w-fast", worker_epoch=drive.epoch("w-fast")))
    routed = ask(drive)
    assert (routed.pool, routed.pools[0].wanted) == ("slow", "fast")
    assert skipped(routed) == [("fast", "no_workers")]


def test_a_full_pool_gives_requests_to_a_faster_one_but_not_to_a_slower_one() -> None:
    drive = pools("slow", "fast", "slower")
    rules(drive, one_cell("slow", "fast"))
    assert [ask(drive, name).pool for name in ("r1", "r2")] == ["slow", "fast"]
    held = ask(drive, "r3")
    assert isinstance(held, RequestHeld)
    assert (held.pool, skipped(held)) == ("slow", [("fast", "full")])
    first = next(one for one in drive.decided if isinstance(one, RequestRouted))
    (served,) = drive("progress", RequestFinished(**progress_fields(first), finish_reason="length"))
    assert (served.request_id, served.pool, served.pools) == ("r3", "slow", ()), "the choice is in RequestHeld"


def test_a_busy_pool_and_one_without_eligible_workers_are_skipped() -> None:
    drive = pools("a", "b", "c", busy=BusyThresholds(active_prefill_tokens_threshold=0))
    drive("fleet", worker_of("d", loras=("sql",)))
    drive("control", pool_of("d"))
    assert ask(drive).pool == "a"
    rules(drive)
    routed = ask(drive, "r2", lora_name="sql")
    assert (routed.pool, skipped(routed)) == (
        "d",
        [("a", "no_eligible_worker"), ("b", "no_eligible_worker"), ("c", "no_eligible_worker")],
    )
    assert skipped(ask(drive, "r3")) == [("a", "busy")]


def test_if_all_refuse_the_preferred_pool_says_why() -> None:
    drive = pools("a", "b", busy=BusyThresholds(active_prefill_tokens_threshold=0))
    rules(drive, one_cell("b"))
    ask(drive, "r1")
    ask(drive, "r2")
    refused = ask(drive, "r3")
    assert (refused.reason, refused.message) == ("busy", "every eligible worker of the pool b is busy")
    assert skipped(refused) == [("a", "busy")]


def test_a_request_waits_for_the_suspect_worker_of_its_only_pool_with_workers() -> None:
    drive = pools("a", "b")
    rules(drive, one_cell("b"))
    lose(drive, "w-a")
    drive("fleet", WorkerSuspect(owner_epoch=0, worker_id="w-b", worker_epoch=drive.epoch("w-b")))
    held = ask(drive)
    assert isinstance(held, RequestHeld)
    assert (held.pool, skipped(held)) == ("b", [("a", "no_workers")])


def test_the_queue_threshold_and_rooms_for_accepted_requests_count_as_full() -> None:
    drive = pools("a", "b", queue=QueueConfig(threshold=0.0))
    rules(drive)
    assert [ask(drive, name).pool for name in ("r1", "r2")] == ["a", "b"]


def test_pools_of_another_block_size_role_or_model_are_not_used() -> None:
    drive = pools("a")
    drive("control", pool_of("b", block_size=8))
    drive("fleet", worker_of("b", block_size=8))
    rules(drive, one_cell("b", "c"))
    routed = ask(drive)
    assert (routed.pool, skipped(routed)) == ("a", [("b", "block_size"), ("c", "unknown")])


def test_the_block_size_is_that_of_the_pools_with_workers() -> None:
    drive = pools("b")
    drive("control", pool_of("a", block_size=8))
    rules(drive)
    routed = ask(drive)
    assert (routed.pool, skipped(routed)) == ("b", [("a", "block_size")])


# Drains and canaries


def test_a_drained_pool_gets_no_new_requests_and_finishes_those_it_has() -> None:
    drive = pools("a", "b")
    rules(drive, one_cell("a"))
    first = ask(drive, "r1")
    drain(drive, "a")
    routed = ask(drive, "r2")
    assert (routed.pool, skipped(routed)) == ("b", [("a", "drained")])
    drive("progress", RequestFinished(**progress_fields(first), finish_reason="length"))
    assert ask(drive, "r3").pool == "b"
    drive("control", pool_of("a"))
    assert isinstance(ask(drive, "r4"), RequestHeld), "a new configuration does not end a drain"
    drain(drive, "a", drained=False)
    assert ask(drive, "r5").pool == "a"


def test_a_canary_takes_its_share() -> None:
    drive = pools("a", "b")
    set_canary(drive, "b", "a")
    routed = ask(drive, "r1")
    assert (routed.pool, routed.pools[0].reason, routed.pools[0].base) == ("b", "canary", "a")
    set_canary(drive, "b", "")
    routed = ask(drive, "r2")
    assert (routed.pool, routed.pools) == ("a", ()), "the last rule is gone"


# Hints and sessions


def test_a_request_that_names_a_worker_goes_to_the_pool_of_that_worker() -> None:
    drive = pools("a", "b")
    rules(drive, one_cell("a"))
    routed = ask(drive, worker_id="w-b")
    assert (routed.worker_id, routed.pools[0].reason) == ("w-b", "worker")
    held = ask(drive, "r2", worker_id="w-b")
    assert (type(held), held.pool) == (RequestHeld, "b")
    assert ask(drive, "r3", worker_id="nobody").message == "the pool a has no worker nobody"
    drain(drive, "b")
    assert "drained pools: b" in ask(drive, "r4", worker_id="w-b").message


@pytest.mark.parametrize(("mode", "again"), [("hard", RequestHeld), ("soft", RequestRouted)])
def test_a_session_keeps_its_pool(mode: Any, again: type) -> None:
    drive = pools("a", "b", session_ttl_s=10.0, session_mode=mode)
    set_canary(drive, "b", "a")
    assert ask(drive, "r1", session_id="s").pools[0].reason == "canary"
    set_canary(drive, "b", "a", 0.0)
    made = ask(drive, "r2", session_id="s")
    assert (type(made), made.pools[0].reason, made.pools[0].wanted) == (again, "session", "b")
    assert made.pool == ("b" if again is RequestHeld else "a")
    drain(drive, "b")
    lose(drive, "w-a")
    drive("fleet", worker_of("a", slot=1))
    assert ask(drive, "r3", session_id="s").pool == "a"


def test_a_session_of_a_lost_worker_or_of_a_pool_without_affinity_has_no_effect() -> None:
    drive = pools("a", "b", session_ttl_s=10.0)
    rules(drive, one_cell("b"))
    ask(drive, "r1", session_id="s")
    drive("control", pool_of("b"))
    assert ask(drive, "r2", session_id="s").pools[0].reason == "grid"
    drive("control", pool_of("b", session_ttl_s=10.0))
    drive("fleet", WorkerSuspect(owner_epoch=0, worker_id="w-b", worker_epoch=drive.epoch("w-b")))
    assert ask(drive, "r3", session_id="s").pools[0].reason == "grid"


# Accepted requests


def test_a_request_that_failed_before_its_first_token_moves_to_a_faster_pool() -> None:
    drive = pools("slow", "medium", "fast")
    drive("fleet", joined("spare", 1, pool="slow"))
    rules(drive, one_cell("slow", "medium", "fast"), retry=True)
    assert ask(drive).pool == "slow"
    worker = next(one for one in drive.decided if isinstance(one, RequestRouted)).worker_id
    (moved,) = lose(drive, worker)
    assert (moved.pool, moved.attempt, moved.pools[0].reason) == ("medium", 2, "retry")
    assert skipped(moved) == [("slow", "failed")]
    (again,) = lose(drive, "w-medium")
    assert (again.pool, again.attempt, skipped(again)) == ("fast", 3, [("medium", "failed")])


@pytest.mark.parametrize(("retry", "begun"), [(False, False), (True, True)])
def test_otherwise_a_request_stays_in_its_pool(retry: bool, begun: bool) -> None:
    drive = pools("slow", "fast")
    drive("fleet", joined("spare", 1, pool="slow"))
    rules(drive, one_cell("slow", "fast"), retry=retry)
    routed = ask(drive)
    if begun:
        drive("progress", FirstTokenEmitted(**progress_fields(routed)))
    (again,) = lose(drive, routed.worker_id)
    assert (again.pool, again.pools) == ("slow", ())


def test_a_failed_request_stays_if_no_faster_pool_can_take_it() -> None:
    drive = pools("slow", "fast")
    drive("fleet", joined("spare", 1, pool="slow"))
    rules(drive, one_cell("slow", "fast"), retry=True)
    drain(drive, "fast")
    (again,) = lose(drive, ask(drive).worker_id)
    assert (again.pool, again.pools) == ("slow", ())


@pytest.mark.parametrize("grids", [(), (one_cell("a", "c"),)])
def test_a_request_whose_pool_has_no_worker_left_moves(grids: tuple[PoolGrid, ...]) -> None:
    drive = pools("a", "b")
    rules(drive, *grids)
    assert ask(drive).pool == "a"
    (moved,) = lose(drive, "w-a")
    assert (moved.pool, moved.pools[0].reason, skipped(moved)[0]) == ("b", "moved", ("a", "no_workers"))
    (ended,) = drive("progress", RequestFinished(**progress_fields(moved), finish_reason="length")) or (None,)
    assert ended is None
    assert len(drive.world.requests) == 0


def test_a_waiting_request_moves_once_another_pool_can_take_it() -> None:
    drive = pools("a", "b")
    rules(drive)
    ask(drive)
    drain(drive, "b")
    assert lose(drive, "w-a") == []
    (moved,) = drain(drive, "b", drained=False)
    assert (moved.pool, moved.attempt) == ("b", 2)


def test_a_pinned_request_is_not_moved() -> None:
    drive = pools("a", "b")
    rules(drive)
    ask(drive, worker_id="w-a")
    (aborted,) = lose(drive, "w-a")
    assert isinstance(aborted, RequestAborted)


def test_a_request_that_was_encoded_stays_in_its_pool_while_it_can() -> None:
    drive = pools("a", "b")
    drive("control", PoolConfigured(pool="e", model="m", block_size=BLOCK, role="encode"))
    drive("fleet", joined("w-e", 0, pool="e", role="encode", kv_events=False))
    rules(drive, one_cell("a"))
    routed = ask(drive, media=(MEDIA,))
    assert (routed.stage, routed.pool, [one.pool for one in routed.pools]) == ("encode", "e", ["a"])
    drain(drive, "a")
    (responding,) = drive("progress", EncodeFinished(**progress_fields(routed), encoded=ENCODED))
    assert (responding.pool, responding.pools) == ("a", ())


# Prefill pools


def disagg(*prefillers: str, retry: bool = False) -> Driver:
    """Return a driver of the decode pool d and of prefill pools, of which each is faster than the one before."""
    drive = pools("d", role="decode", queue=QueueConfig())
    add_pools(drive, *prefillers, role="prefill")
    rules(drive, one_cell(*prefillers, role="prefill", isl_max=40), retry=retry)
    return drive


def test_the_prefill_grid_chooses_the_prefill_pool() -> None:
    drive = disagg("y", "x")
    routed = ask(drive)
    assert (routed.stage, routed.pool) == ("prefill", "y")
    assert [(one.role, one.pool, one.reason) for one in routed.pools] == [("prefill", "y", "grid")]
    assert ask(drive, "r2").pool == "x", "y is full"


def test_both_choices_of_a_request_are_recorded() -> None:
    drive = disagg("y", "x")
    add_pools(drive, "c", role="decode")
    rules(drive, one_cell("x", role="prefill"), one_cell("c", role="decode", target="itl"))
    routed = ask(drive)
    assert [(one.role, one.pool) for one in routed.pools] == [("decode", "c"), ("prefill", "x")]
    (decode,) = prefilled(drive, routed)
    assert (decode.stage, decode.pool, decode.pools) == ("decode", "c", ())


def test_a_failed_prefill_moves_to_a_faster_pool() -> None:
    drive = disagg("z", "y", "x", retry=True)
    routed = ask(drive)
    for pool, before in (("y", "z"), ("x", "y"), ("x", None)):
        failed = PrefillFailed(**progress_fields(routed), error="out of blocks")
        (routed,) = drive("progress", failed)
        if before is None:
            assert routed.stage == "aggregated", "all attempts at a remote prefill are used up"
            continue
        assert (routed.pool, skipped(routed)) == (pool, [(before, "failed")])


def test_without_retry_a_failed_prefill_stays_in_its_pool() -> None:
    drive = disagg("y", "x")
    (routed,) = drive("progress", PrefillFailed(**progress_fields(ask(drive)), error="out of blocks"))
    assert (routed.stage, routed.pool) == ("prefill", "y")


@pytest.mark.parametrize(("drained", "reason"), [(("x", "y"), "no_prefill_worker"), (("x",), "always")])
def test_a_decode_worker_computes_the_prompt_if_all_prefill_pools_are_drained(
    drained: tuple[str, ...], reason: str
) -> None:
    drive = disagg("y", "x")
    for name in drained:
        drain(drive, name)
    routed = ask(drive)
    assert routed.prefill.reason == reason


def test_prefill_pools_without_workers_or_of_another_block_size_are_not_used() -> None:
    drive = disagg("y")
    drive("control", pool_of("x", "prefill", block_size=8))
    drive("fleet", worker_of("x", "prefill", block_size=8))
    routed = ask(drive)
    assert (routed.pool, routed.pools) == ("y", ())
    lose(drive, "w-y")
    assert ask(drive, "r2").prefill.reason == "no_prefill_worker"
    drive = pools("d", role="decode")
    rules(drive)
    assert ask(drive).prefill.reason == "no_prefill_worker"
    assert ask(pools("d", role="decode")).prefill.reason == "no_prefill_worker"


# State


def test_rules_survive_a_snapshot_and_are_part_of_the_digest() -> None:
    drive = pools("a", "b")
    before = drive.world.digest()
    rules(drive, one_cell("b"), retry=True)
    set_canary(drive, "b", "a", 0.5)
    drain(drive, "a")
    drive.world.take_consumed()
    copy = restore(drive.world.snapshot())
    assert copy.digest() == drive.world.digest() != before
    assert copy.registry.grid("m", "aggregated") == one_cell("b")
    assert copy.registry.grid("m", "prefill") is copy.registry.grid("n", "decode") is None
    assert copy.registry.retries("m")
    assert not copy.registry.retries("n")


def test_the_digest_of_a_registry_without_rules_is_zero() -> None:
    registry = PoolRegistry()
    assert registry.digest() == 0
    registry.apply(PoolDrainSet(model="m", pool="a", drained=True))
    assert registry.digest() > 0
    registry.apply(PoolDrainSet(model="m", pool="a", drained=False))
    registry.apply(PoolCanarySet(model="m", pool="a"))
    assert (registry.digest(), registry.has_rules("m")) == (0, False)
