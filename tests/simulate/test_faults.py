"""Simulated failures and disaggregation: latencies against hand-computed values."""

from functools import partial
from typing import Any

import pytest

from forebay.engine_model.timing import decode_us, prefill_us
from forebay.simulate.delays import Draws
from forebay.simulate.outcome import summary
from forebay.simulate.settings import (
    Delays,
    LifeCycleSettings,
    PoolSettings,
    Settings,
    SettingsUnusable,
    Transfer,
    WorkerGroup,
    engine_config,
    policy,
)
from forebay.simulate.simulation import Simulation
from forebay.simulate.transfers import FETCH_US_MAX, LEASE_US
from tests.simulate import scene
from tests.simulate.scene import Turns, crash_at, fleet, latency, split, start_at, turn

run = partial(scene.run, router="round-robin")
served = partial(scene.served, router="round-robin")

S = 1_000_000
PROMPT, BLOCKS = 640, 16_384
FIRST_US = prefill_us(PROMPT)
DECODE_US = decode_us(11, BLOCKS)  # per token, until the eleventh block is full


def dies(
    worker: str, at_us: int, back_us: int | None = None, lease_ttl_s: float = 1.0, **life: Any
) -> LifeCycleSettings:
    """Return a life cycle in which one worker dies once."""
    fault = crash_at(worker=worker, at_us=at_us, back_us=back_us)
    return LifeCycleSettings(faults=(fault,), lease_ttl_s=lease_ttl_s, **life)


def lone_us(prompt: int, output: int) -> int:
    """Return the latency of a request that is alone on its worker."""
    [one] = served(fleet(1), turn(0, prompt, output))
    return one.last_us


@pytest.mark.parametrize(("emitted", "output"), [(1, 100), (17, 100), (60, 100), (1, 2), (17, 20)])
def test_retry_continues_after_emitted_tokens_when_the_lease_expires(emitted: int, output: int) -> None:
    died_us = FIRST_US + (emitted - 1) * DECODE_US + DECODE_US // 2
    life = dies("mock-0", died_us, lease_ttl_s=10.0)
    [one] = served(fleet(2, life), turn(0, PROMPT, output))
    assert (one.failure, one.attempts, one.worker, one.first_us) == ("", 2, 1, FIRST_US)
    assert one.last_us == died_us + 10 * S + lone_us(PROMPT + emitted, output - emitted)


def test_retries_of_equal_prompts_do_not_share_output_blocks() -> None:
    same = {"block_ids": tuple(range(10))}
    begin_us = prefill_us(PROMPT + 64)  # the second request recomputes the last block to get its last token
    died_us = begin_us + 64 * decode_us(22, BLOCKS) + 10 * decode_us(24, BLOCKS) + S // 1_000
    # Both requests run on the only worker. Its replacement joins when it is lost.
    life = dies("mock-0", died_us, back_us=S, lease_ttl_s=5.0)
    emitted = 1 + 64 + 10
    found = served(fleet(1, life), *(turn(at, PROMPT, emitted + 1, **same) for at in (0, 1)))
    # One output block of each request is full. The other request matches prompt blocks only.
    assert {(one.attempts, one.failure) for one in found} == {(2, "")}
    assert {one.last_us for one in found} == {died_us + S + prefill_us(PROMPT + emitted + emitted)}


def test_a_request_continues_after_losing_two_workers() -> None:
    again_us = FIRST_US + DECODE_US // 2 + S + prefill_us(PROMPT + 1) + 9 * DECODE_US + DECODE_US // 2
    faults = crash_at(worker="mock-0", at_us=FIRST_US + DECODE_US // 2), crash_at(worker="mock-2", at_us=again_us)
    [one] = served(fleet(3, LifeCycleSettings(faults=faults, lease_ttl_s=1.0)), turn(0, PROMPT, 100))
    assert (one.attempts, one.first_us) == (3, FIRST_US)
    assert one.last_us == again_us + S + lone_us(PROMPT + 1 + 10, 100 - 1 - 10)


@pytest.mark.parametrize(("early_us", "emitted"), [(1, 0), (0, 1)])
def test_only_a_step_that_ended_emits_its_output(early_us: int, emitted: int) -> None:
    [one] = served(fleet(2, dies("mock-0", FIRST_US - early_us)), turn(0, PROMPT, 100))
    again_us = FIRST_US - early_us + S
    assert one.first_us == (FIRST_US if emitted else again_us + FIRST_US)
    assert one.last_us == again_us + lone_us(PROMPT + emitted, 100 - emitted)


def test_a_completed_response_survives_the_death_of_its_worker() -> None:
    life = dies("mock-0", lone_us(PROMPT, 5), lease_ttl_s=10.0)
    [one] = served(fleet(1, life), turn(0, PROMPT, 5))
    assert (one.failure, one.attempts, one.last_us) == ("", 1, lone_us(PROMPT, 5))


def test_requests_are_routed_to_a_dead_worker_until_half_its_lease() -> None:
    life = dies("mock-0", S, lease_ttl_s=10.0)
    early = [turn(number, at_us=(2 + number) * S) for number in range(4)]
    late = [turn(number, at_us=(3 + number) * S) for number in range(4, 8)]
    found = served(fleet(2, life), *early, *late)
    assert [one.attempts for one in found] == [2, 1, 2, 1, 1, 1, 1, 1]
    assert {one.worker for one in found} == {1}
    # Both lost requests are redispatched together when the lease expires.
    assert {one.first_us for one in (found[0], found[2])} == {11 * S + prefill_us(2 * 64)}


def test_requests_on_a_dead_worker_expire_at_their_deadline() -> None:
    life = dies("mock-0", S, lease_ttl_s=10.0)
    turns = [turn(number, 64, at_us=at_s * S) for number, at_s in enumerate((2, 8, 13))]
    found = served(fleet(1, life, timeout_s=4.0), *turns)
    assert found[0].failure == "the deadline passed"
    assert found[0].first_us == 0
    assert found[1].failure == "the deadline passed after 4.0 s in the router's queue", "a suspect may come back"
    assert found[2].failure == "no worker of the pool default is ready", "it is lost by now"


def test_request_of_a_lost_worker_waits_for_a_replacement_until_its_deadline() -> None:
    life = dies("mock-0", FIRST_US + 1)
    outcome = run(fleet(1, life, timeout_s=30.0), turn(0, PROMPT, 100))
    assert [one.failure for one in outcome.requests] == ["the deadline passed"]
    assert outcome.lasted_us == 30 * S
    # A replacement that joins after the deadline is too late.
    late = crash_at(worker="mock-0", at_us=FIRST_US + 1, back_us=3 * 86_400 * S)
    for faults in (life.faults, (late,)):
        a_day = run(fleet(1, LifeCycleSettings(faults=faults, lease_ttl_s=1.0)), turn(0, PROMPT, 100))
        assert (a_day.requests[0].failure, a_day.lasted_us) == ("the deadline passed", 86_400 * S)


def test_expired_request_frees_its_engine() -> None:
    system = fleet(1, sizes={"max_num_seqs": 1}, timeout_s=3.0)
    found = served(system, turn(0, PROMPT, 9_999), turn(1, PROMPT, at_us=S))
    assert [one.failure for one in found] == ["the deadline passed", ""]
    assert 3 * S + FIRST_US <= found[1].first_us < 3 * S + FIRST_US + 2 * DECODE_US


def test_a_tiny_timeout_expires_before_the_first_token() -> None:
    outcome = run(fleet(1, timeout_s=1e-9), turn(0, PROMPT, 100))
    assert (outcome.requests[0].failure, outcome.lasted_us) == ("the deadline passed", 1)


def test_replacement_process_starts_empty_and_takes_queued_requests() -> None:
    died_us, back_us = 2 * S, 15 * S
    life = dies("mock-0", died_us, back_us=back_us, cold_start_s=3.0, lease_ttl_s=10.0)
    same = {"block_ids": tuple(range(1, 11))}
    before = [turn(0, PROMPT, 1, **same), turn(1, PROMPT, 1, at_us=S, **same)]
    found = served(
        fleet(1, life), *before, turn(2, PROMPT, 1, at_us=3 * S, **same), turn(3, PROMPT, 1, at_us=30 * S, **same)
    )
    assert [one.cached_tokens for one in found] == [0, PROMPT - 64, 0, PROMPT - 64]
    assert [one.attempts for one in found] == [1, 1, 2, 1]
    assert found[2].first_us == died_us + back_us + 3 * S + FIRST_US


def test_a_replacement_ends_the_lease_of_its_predecessor() -> None:
    life = dies("mock-0", 2 * S, back_us=S, lease_ttl_s=10.0)
    # The replacement stays ready when half, then all, of the old lease would have passed.
    found = served(
        fleet(1, life), *(turn(number, 64, at_us=at_us) for number, at_us in enumerate((2 * S + 1, 8 * S, 13 * S)))
    )
    assert [(one.attempts, one.failure) for one in found] == [(2, ""), (1, ""), (1, "")]
    assert [one.first_us - prefill_us(64) for one in found] == [3 * S, 8 * S, 13 * S]


def test_a_process_can_die_before_it_joins() -> None:
    faults = crash_at(worker="mock-0", at_us=2 * S, back_us=S), crash_at(worker="mock-0", at_us=4 * S, back_us=S)
    life = LifeCycleSettings(faults=faults, cold_start_s=3.0, lease_ttl_s=10.0)
    outcome = run(fleet(1, life), turn(0, 64, at_us=2 * S + 1))
    assert [one.first_us for one in outcome.requests] == [8 * S + prefill_us(64)]
    assert outcome.gpu_s == pytest.approx(2 + 1 + (outcome.lasted_us / S - 5))


def test_a_request_fails_after_losing_three_workers() -> None:
    faults = tuple(crash_at(worker=f"mock-{number}", at_us=at_s * S) for number, at_s in ((0, 1), (2, 3), (1, 5)))
    [one] = served(fleet(3, LifeCycleSettings(faults=faults, lease_ttl_s=1.0)), turn(0, 100_000, 9_999))
    assert (one.failure[:9], one.attempts) == ("3 workers", 3)


def test_workers_started_later_cost_gpu_time_from_their_start() -> None:
    life = LifeCycleSettings(starts=(start_at(at_us=2 * S, count=2),), cold_start_s=3.0)
    outcome = run(fleet(1, life), *(turn(number, at_us=number * S) for number in range(10)))
    assert outcome.workers == ["mock-0", "mock-1", "mock-2"]
    # They join at 5 s, before the request that arrives at 5 s.
    assert [one.worker for one in outcome.requests] == [0, 0, 0, 0, 0, 2, 0, 1, 2, 0]
    lasted_s = outcome.lasted_us / S
    assert outcome.gpu_s == pytest.approx(lasted_s + 2 * (lasted_s - 2))
    assert [len(figure) for figure in (outcome.timeline.computed, summary(outcome, 1)["workers"])] == [3, 3]
    assert (outcome.timeline.workers[0], outcome.timeline.workers[-1]) == (1, 3)


def test_worker_metrics_are_separate_if_an_earlier_worker_never_joined() -> None:
    starts = start_at(at_us=2 * S), start_at(at_us=4 * S)
    turns = [turn(number, at_us=number * S) for number in range(30)]
    for back_us in (None, 10 * S):
        faults = (crash_at(worker="mock-1", at_us=3 * S, back_us=back_us),)
        outcome = run(fleet(1, LifeCycleSettings(starts=starts, faults=faults, cold_start_s=3.0)), *turns)
        computed = [0, 0, 0]
        for one in outcome.requests:
            assert one.worker is not None
            computed[one.worker] += one.prompt_tokens
        assert (computed[1] > 0, computed[2] > 0) == (back_us is not None, True)
        assert [sum(bins) for bins in outcome.timeline.computed] == computed
        assert {len(bins) for bins in outcome.timeline.running} == {len(outcome.timeline.arrived)}


def test_a_dead_worker_is_idle_in_the_timeline() -> None:
    life = dies("mock-0", 2 * S)
    found = run(fleet(2, life), turn(0, PROMPT, 9_999), turn(1, at_us=20 * S)).timeline
    after = 2 * S // found.bin_us + 1
    assert found.running[0][after - 2] == 1
    assert {*found.running[0][after:], *found.waiting[0][after:]} == {0}


def test_a_random_failure_time_applies_to_one_process_only() -> None:
    draws = Draws(4, "failures mock-0")
    first_us, second_us = draws.next(100 * S), draws.next(100 * S)
    assert first_us + 20 * S < first_us // 2 + second_us, "the second process outlives the remaining time of the first"
    faults = (crash_at(worker="mock-0", at_us=first_us // 2, back_us=0),)
    life = LifeCycleSettings(faults=faults, mtbf_s=100.0, lease_ttl_s=5.0)
    [one] = served(fleet(1, life, seed=4), turn(0, at_us=first_us + S))
    assert (one.attempts, one.failure) == (1, "")


def test_worker_started_at_the_end_of_the_run_costs_nothing() -> None:
    life = LifeCycleSettings(starts=(start_at(at_us=2 * S),))
    outcome = run(fleet(1, life, delays=Delays(progress=latency(fixed_us=5 * S))), turn(0))
    assert outcome.gpu_s == outcome.lasted_us / S == prefill_us(64) / S


def test_a_replacement_process_draws_its_own_delays() -> None:
    life = dies("mock-0", 20 * S, back_us=0, lease_ttl_s=10.0)
    slow = Delays(tokens=latency(jitter_us=100_000))
    found = served(fleet(1, life, delays=slow), turn(0), turn(1, at_us=30 * S))
    assert len({one.first_us - one.arrived_us for one in found}) == 2


def test_gpu_seconds_exclude_the_time_between_death_and_restart() -> None:
    life = dies("mock-0", 2 * S, back_us=3 * S, cold_start_s=2.0)
    group = WorkerGroup(count=2, engine=engine_config(), gpus=4.0)
    system = Settings(pools=(PoolSettings(groups=(group,)),), life=life)
    outcome = run(system, turn(0), turn(1, at_us=10 * S))
    lasted_s = outcome.lasted_us / S
    assert outcome.gpu_s == pytest.approx(4.0 * (lasted_s + lasted_s - 3))


def test_random_failures_depend_on_the_seed() -> None:
    turns = [turn(number, 640, 50, at_us=number * S) for number in range(120)]
    runs = [
        run(fleet(3, LifeCycleSettings(mtbf_s=20.0, repair_s=2.0, lease_ttl_s=3.0), seed=seed), *turns)
        for seed in (0, 0, 1)
    ]
    assert runs[0].digest == runs[1].digest != runs[2].digest
    assert runs[0].gpu_s < 3 * runs[0].lasted_us / S - 10
    assert any(one.attempts > 1 for one in runs[0].requests)


@pytest.mark.parametrize(
    ("life", "where", "reason"),
    [
        (LifeCycleSettings(starts=(start_at(at_us=0, group=1),)), "starts[0].group", "has 1 worker groups"),
        (
            LifeCycleSettings(faults=(crash_at(worker="mock-1", at_us=9), crash_at(worker="mock-1", at_us=5))),
            "faults[0].at_s",
            "mock-1 is not replaced",
        ),
        (
            LifeCycleSettings(starts=(start_at(at_us=0, count=4_095),)),
            "pools",
            "got 4097 workers; the maximum is 4096",
        ),
    ],
)
def test_inconsistent_life_cycles_are_rejected(life: LifeCycleSettings, where: str, reason: str) -> None:
    with pytest.raises(SettingsUnusable) as caught:
        Simulation(fleet(2, life), policy("kv"))
    assert caught.value.where == where
    assert reason in caught.value.reason


def test_every_pool_serves_its_model_with_its_block_size() -> None:
    small, large = (WorkerGroup(count=1, engine=engine_config(block_size=size)) for size in (16, 64))
    pools = (
        PoolSettings(name="a", model="small", groups=(small,)),
        PoolSettings(name="b", model="large", groups=(large,), router=policy("random")),
    )
    models = ("small", "large", "", "huge")
    turns = [turn(at, 100, model=name, at_us=at * S) for at, name in enumerate(models)]
    outcome = run(Settings(pools=pools), *turns)
    assert [one.worker for one in outcome.requests] == [0, 1, 0, None]
    assert [one.failure for one in outcome.requests] == ["", "", "", "no pool serves the model huge"]
    decisions = scene.routed(Settings(pools=pools), *turns, router="round-robin").values()
    assert [decision.mode for decision in decisions] == ["round-robin", "random", "round-robin"]


# Disaggregation


BYTES = PROMPT * 1_000_000
TRANSFER = Transfer(kv_bytes_per_token=1_000_000, kv_transfer_bandwidth=10.0, kv_transfer_latency_us=300)
TRANSFER_US = BYTES // 10_000
PREFILL_US = prefill_us(PROMPT)
FETCHED_DECODE_US = decode_us(10, BLOCKS)  # the blocks of the prompt are full and include its last token


def test_a_prompt_is_prefilled_transferred_and_decoded() -> None:
    outcome = run(split(1, 1, transfer=TRANSFER), turn(0, PROMPT, 3))
    [one] = outcome.requests
    assert (one.prefiller, one.worker, one.attempts, one.cached_tokens) == (0, 1, 1, 0)
    assert one.prefilled_us == PREFILL_US
    assert (one.transferred_bytes, one.transfer_us) == (BYTES, 300 + TRANSFER_US)
    assert one.first_us == PREFILL_US + 300 + TRANSFER_US + FETCHED_DECODE_US
    assert one.last_us == one.first_us + 2 * decode_us(11, BLOCKS)
    totals = summary(outcome, 2)
    assert (totals["prefilled_remotely"], totals["transferred_bytes"]) == (1, BYTES)
    assert totals["transfer_ms"]["mean"] == (300 + TRANSFER_US) / 1e3
    assert totals["prefill_ms"]["p99"] == PREFILL_US / 1e3
    assert [worker["computed_tokens"] for worker in totals["workers"]] == [PROMPT, 0]
    assert totals["load_max_over_mean"] == 1.0
    assert sum(outcome.timeline.computed[0]) == sum(outcome.timeline.prompt_tokens) == PROMPT
    assert sum(outcome.timeline.computed[1]) == 0


def test_every_message_is_delayed() -> None:
    ways = Delays(
        submit=latency(fixed_us=1),
        work=latency(fixed_us=20),
        tokens=latency(fixed_us=300),
        progress=latency(fixed_us=4_000),
    )
    [one] = served(split(1, 1, transfer=TRANSFER, delays=ways), turn(0, PROMPT))
    assert one.first_us == 1 + 20 + PREFILL_US + 4_000 + 20 + 300 + TRANSFER_US + FETCHED_DECODE_US + 300


def test_a_decode_pool_without_prefill_pool_prefills_locally() -> None:
    turns = [turn(number, 64 + 100 * number, 20, at_us=number * 30_000) for number in range(20)]
    alone, usual = served(split(0, 2), *turns), served(fleet(2), *turns)
    assert alone == usual
    assert {one.prefiller for one in alone} == {None}


def test_the_policy_decides_which_prompts_are_prefilled_remotely() -> None:
    router = "round-robin:disagg.policy=isl_bounding,disagg.eff_isl_threshold=200,disagg.eff_isl_ratio_threshold=1.0"
    lengths = (64, 199, 200, 900)
    found = served(split(1, 1), *(turn(at, length, at_us=at * S) for at, length in enumerate(lengths)), router=router)
    # An uncached prompt has ratio 1, which is not below 1. Only a partly cached prompt counts as short.
    assert [one.prefiller for one in found] == [0, 0, 0, 0]
    found = served(
        split(1, 1), *(turn(at, 192 + 4 * at, at_us=at * S, block_ids=tuple(range(3))) for at in (0, 1)), router=router
    )
    assert [one.prefiller for one in found] == [0, None]
    assert [(one.worker, one.transferred_bytes > 0) for one in found] == [(1, True), (1, False)]


def test_prefill_of_a_dead_worker_is_retried_on_another() -> None:
    life = dies("mock-0", PREFILL_US // 2)
    [one] = served(split(2, 1, life, transfer=TRANSFER), turn(0, PROMPT))
    assert (one.failure, one.attempts, one.prefiller) == ("", 2, 1)
    assert one.prefilled_us == PREFILL_US // 2 + S + PREFILL_US


def test_a_fetch_from_a_worker_that_dies_while_sending_times_out() -> None:
    life = dies("mock-0", PREFILL_US + 300 + TRANSFER_US // 2, lease_ttl_s=60.0)
    [one] = served(split(2, 1, life, transfer=TRANSFER), turn(0, PROMPT))
    assert (one.failure, one.attempts, one.prefiller) == ("", 2, 1)
    assert one.prefilled_us == PREFILL_US + FETCH_US_MAX + PREFILL_US
    assert (one.transferred_bytes, one.transfer_us) == (BYTES, 300 + TRANSFER_US)


def test_kv_for_a_dead_decode_worker_is_released_at_once() -> None:
    life = dies("mock-2", PREFILL_US + 300 + TRANSFER_US // 2)
    simulation = Simulation(split(2, 2, life, transfer=TRANSFER), policy("round-robin"))
    [one] = simulation.run(Turns(turn(0, PROMPT, 2)), lambda _: None).requests
    assert (one.failure, one.attempts, one.prefiller, one.worker) == ("", 2, 1, 3)
    assert one.last_us < LEASE_US, "no lease ended anything"
    prefill, again, *_ = simulation.cluster.ranks.values()
    assert [(rank.engine.pool.used, rank.retained) for rank in (prefill, again)] == [(0, {})] * 2


def test_started_request_continues_on_its_decode_worker() -> None:
    first_us = PREFILL_US + 300 + TRANSFER_US + FETCHED_DECODE_US
    life = dies("mock-1", first_us + 1)
    [one] = served(split(1, 2, life, transfer=TRANSFER), turn(0, PROMPT, 2))
    assert (one.failure, one.attempts, one.worker, one.first_us) == ("", 2, 2, first_us)
    assert one.last_us == first_us + 1 + S + prefill_us(PROMPT + 1)


def test_expired_kv_is_prefilled_again() -> None:
    # The first response occupies the decode worker for longer than a KV lease.
    sizes = {"kv_blocks": 100, "max_num_batched_tokens": 8_192}
    turns = turn(0, 64, 99 * 64), turn(1, 64 * 80, 1, at_us=20 * S)
    outcome = run(split(1, 1, sizes=sizes, transfer=TRANSFER), *turns)
    first, second = outcome.requests
    assert first.last_us - 20 * S > LEASE_US
    assert (second.failure, second.attempts) == ("", 2)
    assert second.prefilled_us > 20 * S + LEASE_US


def test_aborted_request_leaves_no_state() -> None:
    slow = Transfer(kv_bytes_per_token=1_000_000, kv_transfer_bandwidth=0.5)
    turns = [turn(at, PROMPT, 50, at_us=at * 10_000) for at in range(12)]
    simulation = Simulation(split(1, 2, transfer=slow, timeout_s=4.0), policy("round-robin"))
    found = list(simulation.run(Turns(*turns), lambda _: None).requests)
    assert {bool(one.failure) for one in found} == {True, False}
    ranks = simulation.cluster.ranks.values()
    assert [(rank.engine.pool.used, rank.retained) for rank in ranks] == [(0, {})] * 3


def test_a_prompt_too_large_for_every_worker_fails_with_the_reason() -> None:
    sizes = {"kv_blocks": 10}
    [one, other] = served(split(1, 1, sizes=sizes), turn(0, 700), turn(1, 600, 100))
    assert "700 prompt tokens and 0 to generate need 11 KV blocks" in one.failure
    assert "600 prompt tokens and 100 to generate need 11 KV blocks" in other.failure
