"""Simulated disaggregation: latencies against hand-computed values, and failures of workers and transfers."""

import msgspec
import pytest

from forebay.engine_model.timing import decode_us, prefill_us
from forebay.simulate.outcome import RequestOutcome, SimulationOutcome, summary
from forebay.simulate.settings import (
    Delay,
    Delays,
    LifeCycleSettings,
    Settings,
    SettingsUnusable,
    Transfer,
    WorkerFault,
    policy,
    validate_settings,
)
from forebay.simulate.simulation import Simulation
from forebay.simulate.transfers import FETCH_US_MAX, LEASE_US
from forebay.simulate.workload import Turn
from tests.simulate.fleets import Turns, fleet, split, turn

S = 1_000_000
PROMPT, BLOCKS = 640, 16_384
BYTES = PROMPT * 1_000_000
TRANSFER = Transfer(kv_bytes_per_token=1_000_000, kv_transfer_bandwidth=10.0, kv_transfer_latency_us=300)
TRANSFER_US = BYTES // 10_000
PREFILL_US = prefill_us(PROMPT)
DECODE_US = decode_us(10, BLOCKS)  # the blocks of the prompt are full and include its last token


def run(system: Settings, *turns: Turn, router: str = "round-robin") -> SimulationOutcome:
    return Simulation(system, policy(router)).run(Turns(*turns), lambda _: None)


def served(system: Settings, *turns: Turn, router: str = "round-robin") -> list[RequestOutcome]:
    return list(run(system, *turns, router=router).requests)


def test_a_prompt_is_prefilled_transferred_and_decoded() -> None:
    outcome = run(split(1, 1, transfer=TRANSFER), turn(0, PROMPT, 3))
    [one] = outcome.requests
    assert (one.prefiller, one.worker, one.attempts, one.cached_tokens) == (0, 1, 1, 0)
    assert one.prefilled_us == PREFILL_US
    assert (one.transferred_bytes, one.transfer_us) == (BYTES, 300 + TRANSFER_US)
    assert one.first_us == PREFILL_US + 300 + TRANSFER_US + DECODE_US
    assert one.last_us == one.first_us + 2 * decode_us(11, BLOCKS)
    totals = summary(outcome, 2)
    assert (totals["prefilled_remotely"], totals["transferred_bytes"]) == (1, BYTES)
    assert totals["transfer_ms"]["mean"] == (300 + TRANSFER_US) / 1e3
    assert totals["prefill_ms"]["p99"] == PREFILL_US / 1e3
    assert [worker["computed_tokens"] for worker in totals["workers"]] == [PROMPT, 0]
    assert totals["load_max_over_mean"] == 1.0
    assert sum(outcome.timeline.computed[0]) == sum(outcome.timeline.prompt_tokens) == PROMPT
    assert sum(outcome.timeline.computed[1]) == 0


def test_a_transfer_is_instant_without_bandwidth_and_latency_limits() -> None:
    [one] = served(split(1, 1, transfer=Transfer(kv_transfer_bandwidth=0.0)), turn(0, PROMPT, 1))
    assert (one.first_us, one.transfer_us) == (PREFILL_US + DECODE_US, 0)
    assert one.transferred_bytes == PROMPT * 131_072


def test_a_link_transfers_one_request_at_a_time() -> None:
    both_us = prefill_us(2 * PROMPT)
    for prefill, decode in ((1, 2), (1, 1)):  # one sends to two, or to one
        found = served(split(prefill, decode, transfer=TRANSFER), turn(0, PROMPT), turn(1, PROMPT))
        assert [one.prefilled_us for one in found] == [both_us] * 2
        assert [one.transfer_us for one in found] == [300 + TRANSFER_US, 300 + 2 * TRANSFER_US]
    found = served(split(2, 1, transfer=TRANSFER), turn(0, PROMPT), turn(1, PROMPT))  # one receives from two
    assert [one.transfer_us for one in found] == [300 + TRANSFER_US, 300 + 2 * TRANSFER_US]
    found = served(split(2, 2, transfer=TRANSFER), turn(0, PROMPT), turn(1, PROMPT))
    assert [one.transfer_us for one in found] == [300 + TRANSFER_US] * 2


def test_blocks_cached_by_the_decode_worker_are_not_transferred() -> None:
    first, more = turn(0, PROMPT, block_ids=tuple(range(10))), turn(1, 704, block_ids=tuple(range(11)), at_us=S)
    found = served(split(1, 1, transfer=TRANSFER), first, more)
    assert [one.transferred_bytes for one in found] == [BYTES, BYTES // 10]
    assert [one.cached_tokens for one in found] == [0, PROMPT]  # of the prefill worker
    assert found[1].prefilled_us == S + prefill_us(64)


def test_every_message_is_delayed() -> None:
    ways = Delays(
        submit=Delay(fixed_us=1), work=Delay(fixed_us=20), tokens=Delay(fixed_us=300), progress=Delay(fixed_us=4_000)
    )
    [one] = served(split(1, 1, transfer=TRANSFER, delays=ways), turn(0, PROMPT))
    assert one.first_us == 1 + 20 + PREFILL_US + 4_000 + 20 + 300 + TRANSFER_US + DECODE_US + 300


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


def test_remote_prefills_do_not_slow_decoding() -> None:
    turns = [turn(0, 64, 200), *(turn(at, 6_400, 2, at_us=at * 300_000) for at in range(1, 5))]
    apart, together = served(split(1, 1), *turns)[0], served(fleet(1), *turns)[0]
    lasted_us = [(one.last_us - one.first_us) / 199 for one in (apart, together)]
    assert lasted_us[0] < 0.7 * lasted_us[1]


def test_prefill_of_a_dead_worker_is_retried_on_another() -> None:
    life = LifeCycleSettings(faults=(WorkerFault(worker="mock-0", at_us=PREFILL_US // 2),), lease_ttl_s=1.0)
    [one] = served(split(2, 1, life, transfer=TRANSFER), turn(0, PROMPT))
    assert (one.failure, one.attempts, one.prefiller) == ("", 2, 1)
    assert one.prefilled_us == PREFILL_US // 2 + S + PREFILL_US


def test_a_fetch_from_a_worker_that_dies_while_sending_times_out() -> None:
    life = LifeCycleSettings(
        faults=(WorkerFault(worker="mock-0", at_us=PREFILL_US + 300 + TRANSFER_US // 2),), lease_ttl_s=60.0
    )
    [one] = served(split(2, 1, life, transfer=TRANSFER), turn(0, PROMPT))
    assert (one.failure, one.attempts, one.prefiller) == ("", 2, 1)
    assert one.prefilled_us == PREFILL_US + FETCH_US_MAX + PREFILL_US
    assert (one.transferred_bytes, one.transfer_us) == (BYTES, 300 + TRANSFER_US)


def test_fetch_from_a_dead_worker_times_out() -> None:
    ways = Delays(work=Delay(fixed_us=S))
    life = LifeCycleSettings(
        faults=(WorkerFault(worker="mock-0", at_us=S + PREFILL_US + 1, back_us=0),), lease_ttl_s=60.0
    )
    [one] = served(split(1, 1, life, transfer=TRANSFER, delays=ways), turn(0, PROMPT))
    # The worker rejoins with a new epoch before the decode worker fetches.
    assert (one.failure, one.attempts, one.prefiller) == ("", 2, 0)
    assert one.prefilled_us == 2 * S + PREFILL_US + FETCH_US_MAX + S + PREFILL_US


def test_prompt_is_prefilled_again_if_its_decode_worker_dies_while_fetching() -> None:
    life = LifeCycleSettings(
        faults=(WorkerFault(worker="mock-1", at_us=PREFILL_US + 300 + TRANSFER_US // 2),), lease_ttl_s=1.0
    )
    [one] = served(split(1, 2, life, transfer=TRANSFER), turn(0, PROMPT, 2))
    assert (one.failure, one.attempts, one.prefiller, one.worker) == ("", 2, 0, 2)
    assert one.prefilled_us == PREFILL_US + 300 + TRANSFER_US // 2 + S + prefill_us(64)  # the other blocks are cached


def test_kv_for_a_dead_decode_worker_is_released_at_once() -> None:
    life = LifeCycleSettings(
        faults=(WorkerFault(worker="mock-2", at_us=PREFILL_US + 300 + TRANSFER_US // 2),), lease_ttl_s=1.0
    )
    simulation = Simulation(split(2, 2, life, transfer=TRANSFER), policy("round-robin"))
    [one] = simulation.run(Turns(turn(0, PROMPT, 2)), lambda _: None).requests
    assert (one.failure, one.attempts, one.prefiller, one.worker) == ("", 2, 1, 3)
    assert one.last_us < LEASE_US, "no lease ended anything"
    prefill, again, *_ = simulation.cluster.ranks.values()
    assert [(rank.engine.pool.used, rank.retained) for rank in (prefill, again)] == [(0, {})] * 2


def test_started_request_continues_on_its_decode_worker() -> None:
    first_us = PREFILL_US + 300 + TRANSFER_US + DECODE_US
    life = LifeCycleSettings(faults=(WorkerFault(worker="mock-1", at_us=first_us + 1),), lease_ttl_s=1.0)
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


@pytest.mark.parametrize(
    ("role", "changes", "where", "reason"),
    [
        ("decode", {"role": "prefill", "name": "p2"}, "pools[1].model", "both compute prompts for model 'simulated'"),
        ("prefill", {"role": "decode", "name": "d2"}, "pools[1].model", "both serve model 'simulated'"),
        ("decode", {"role": "aggregated"}, "pools[0].role", "needs a pool with role 'decode' for model 'simulated'"),
        ("decode", {"model": "other"}, "pools[0].role", "prefill pool 'prefill' needs a pool with role 'decode'"),
        (
            "decode",
            {"groups": fleet(1, sizes={"block_size": 16}).pools[0].groups},
            "pools[0].workers[0]",
            "got 64, but decode pool 'default' has 16",
        ),
    ],
)
def test_inconsistent_pools_are_rejected(role: str, changes: dict[str, object], where: str, reason: str) -> None:
    system = split(1, 1)
    pools = tuple(msgspec.structs.replace(one, **changes) if one.role == role else one for one in system.pools)
    if changes.get("role") in ("prefill", "decode"):
        pools = (
            *(one for one in system.pools if one.role == changes["role"]),
            *(one for one in pools if one.name[-1] == "2"),
        )
    with pytest.raises(SettingsUnusable) as refused:
        validate_settings(msgspec.structs.replace(system, pools=pools))
    assert refused.value.where.startswith(where)
    assert reason in refused.value.reason
