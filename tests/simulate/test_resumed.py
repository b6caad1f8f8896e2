"""A simulation resumed from recorded state."""

from typing import Any

import msgspec
import pytest

from forebay.core.world import World
from forebay.engine_model.timing import LinearTiming, decode_us
from forebay.events.base import pack_u64
from forebay.events.control import BusyThresholds, RouterConfig
from forebay.events.fleet import WorkerLost
from forebay.events.kv import StoreBlocksAdded
from forebay.events.requests import RequestCancelled, RoutingHints, Sampling
from forebay.events.snapshots import Chunk
from forebay.events.topics import FLEET, REQUESTS
from forebay.runtime.errors import ConfigError
from forebay.simulate.arrivals import Arrival
from forebay.simulate.resumed import ResumedOutcome, SimulatedHardware, resume
from forebay.simulate.settings import Delay, Delays, Transfer
from forebay.simulate.tiers.settings import FleetTiers, HostTier, StoreTier
from tests.core.worlds import Driver, joined, pool, request

BLOCK = 4
CHAIN = list(range(100, 140))


def fleet(*workers: str, router: RouterConfig | None = None, **changes: Any) -> Driver:
    drive = Driver()
    drive("control", msgspec.structs.replace(pool(), router=router or RouterConfig()))
    for slot, worker in enumerate(workers):
        drive("fleet", joined(worker, slot, **changes))
    return drive


def state_of(world: World) -> list[Chunk]:
    world.take_consumed()
    return list(world.snapshot())


def submit(name: str, blocks: list[int], at_us: int = 1_000, output: int = 2, **changes: Any) -> Arrival:
    fields = {"token_ids": b"", "withheld_tokens": len(blocks) * BLOCK + 1, "timeout_us": 1_000_000_000, "tie_seed": 1}
    return Arrival(at_us, REQUESTS, request(name, blocks, **fields, sampling=Sampling(max_tokens=output), **changes))


def resumed(drive: Driver, *arrivals: Arrival, **options: Any) -> ResumedOutcome:
    return resume(state_of(drive.world), arrivals, lambda _: None, **options)


def test_caches_start_with_the_blocks_of_the_index_and_other_tiers_start_empty() -> None:
    drive = fleet("a", "b", kv_store="s", kv_blocks_total=100)
    drive.stored("b", CHAIN[:3])
    drive.stored("b", CHAIN[:6], tier="host", seq=2)
    drive("kv-events", StoreBlocksAdded(store="s", worker_id="a", sequence_hashes=pack_u64(CHAIN[:10])))
    tiers = FleetTiers(host=HostTier(size="50blocks"), store=StoreTier(size="90blocks"))
    for hardware in (SimulatedHardware(), SimulatedHardware(tiers=tiers)):
        found = resumed(drive, submit("r", CHAIN[:12]), hardware=hardware).served["r"]
        assert (found.worker, found.cached_tokens, found.host_tokens, found.store_tokens) == (1, 3 * BLOCK, 0, 0)
    small = SimulatedHardware(tiers=FleetTiers(host=HostTier(size="1KB")))
    with pytest.raises(ConfigError, match="tiers of worker a: host: got a size of 1KB, but one block has 524288 bytes"):
        resumed(drive, submit("r", CHAIN[:12]), hardware=small)


def test_blocks_beyond_the_size_of_a_cache_get_no_credit() -> None:
    drive = fleet("a", "b", kv_blocks_total=10)
    drive.stored("a", CHAIN[20:22])
    drive.stored("b", CHAIN[:10] + CHAIN[20:26])
    found = resumed(drive, submit("r", CHAIN[20:26])).served["r"]
    assert (found.worker, found.cached_tokens) == (0, 2 * BLOCK)


def test_a_cancelled_request_frees_the_engine() -> None:
    cancelled = Arrival(1_001, REQUESTS, RequestCancelled(request_id="r1"))
    run = resumed(fleet("a"), submit("r1", CHAIN[:10], output=100), cancelled, submit("r2", CHAIN[10:12], 1_002))
    assert run.served["r1"].failure == "client disconnected"
    assert run.served["r2"].failure == ""


def test_load_reports_are_made_if_busy_thresholds_need_them() -> None:
    busy = BusyThresholds(active_decode_blocks_threshold=0.01)
    drive = fleet("a", router=RouterConfig(busy=busy))
    arrivals = [submit(f"r{number}", CHAIN[:10], 1_000 + 30_000 * number, 20, nonce=number) for number in range(1, 20)]
    assert any("busy" in one.failure for one in resumed(drive, *arrivals).served.values())


def test_a_worker_without_kv_events_still_reuses_its_cache() -> None:
    drive = fleet("a", kv_events=False)
    served = resumed(drive, submit("r1", CHAIN[:5]), submit("r2", CHAIN[:5], 10_000_000, nonce=2)).served
    assert served["r2"].cached_tokens == 5 * BLOCK


def test_workers_join_and_are_lost_at_recorded_times() -> None:
    joins = [
        Arrival(1_000, FLEET, msgspec.structs.replace(joined(name, slot), owner_epoch=7))
        for slot, name in enumerate("ab")
    ]
    lost = WorkerLost(owner_epoch=7, worker_id="a", worker_epoch=99)
    pinned = submit("r1", CHAIN[:4], 2_000, output=200, routing=RoutingHints(worker_id="a", rank=0))
    later = Arrival(900_000_000, FLEET, joins[0].event)
    again = submit("r3", CHAIN[:4], 900_000_001, routing=RoutingHints(worker_id="a", rank=0))
    run = resumed(
        fleet(), *joins, pinned, submit("r2", CHAIN[:4], 3_000, output=200), Arrival(500_000, FLEET, lost), later, again
    )
    assert run.ranks == [("a", 0), ("b", 0)]
    # Its worker was lost during the response, and the request is pinned to that worker.
    first = run.served["r1"]
    assert (first.worker, first.attempts, first.cached_tokens) == (0, 1, 0)
    assert first.failure == "worker a was lost, and the request is pinned to it"
    assert 0 < first.first_us < 500_000
    assert (run.served["r2"].worker, run.served["r2"].failure) == (1, "")
    assert (run.served["r3"].worker, run.served["r3"].failure) == (0, "")


def test_timing_and_delays_are_applied() -> None:
    usual, slow, far = (
        resumed(fleet("a"), submit("r", CHAIN[:10], output=3), **options).served["r"]
        for options in (
            {},
            {"hardware": SimulatedHardware(timing=LinearTiming(step=1_000_000.0))},
            {"delays": Delays(work=Delay(fixed_ms=0.7), tokens=Delay(fixed_ms=0.03))},
        )
    )
    assert slow.first_us - slow.arrived_us == 1_000_000
    assert slow.last_us - slow.first_us == 2_000_000
    assert (far.first_us, far.last_us) == (usual.first_us + 730, usual.last_us + 730)


LINK = Transfer(kv_bytes_per_token=1_000, kv_transfer_bandwidth=0.001, kv_transfer_latency_us=70)
LINKED = SimulatedHardware(transfer=LINK)


def disaggregated(prefill: str, decode: str, **changes: Any) -> Driver:
    """Return a prefill and a decode pool of one model, with one worker per letter."""
    drive = Driver()
    for role in ("prefill", "decode"):
        drive("control", msgspec.structs.replace(pool(), pool=role, role=role, router=RouterConfig()))
    for slot, worker in enumerate([*prefill, *decode]):
        role = "prefill" if worker in prefill else "decode"
        drive("fleet", joined(worker, slot, role=role, pool=role, **(changes if role == "prefill" else {})))
    return drive


def test_prompts_are_prefilled_transferred_and_decoded() -> None:
    drive = disaggregated("pq", "d")
    drive.stored("q", CHAIN[:10])
    run = resumed(drive, submit("r", CHAIN[:12]), hardware=LINKED)
    one = run.served["r"]
    assert run.ranks == [("d", 0), ("p", 0), ("q", 0)]
    assert (one.worker, one.prefiller, one.cached_tokens) == (0, 2, 10 * BLOCK)
    assert (one.transferred_bytes, one.transfer_us) == (13 * BLOCK * 1_000, 70 + 13 * BLOCK * 1_000)
    assert one.arrived_us < one.prefilled_us == one.first_us - one.transfer_us - decode_us(13 * BLOCK, 64 * BLOCK)


def test_ranks_of_a_prefill_worker_retain_their_kv() -> None:
    drive = disaggregated("p", "de", dp_size=2, dp_start_rank=3)
    drive.stored("p", CHAIN[:10], rank=4)
    cancellation = Arrival(50_000, REQUESTS, RequestCancelled(request_id="cancelled"))
    both = [submit("stays", CHAIN[:10]), submit("cancelled", CHAIN[:10], 1_001, nonce=1)]
    run = resumed(drive, *both, submit("other", CHAIN[20:30], 1_002, nonce=2), cancellation, hardware=LINKED)
    assert run.ranks == [("d", 0), ("e", 0), ("p", 3), ("p", 4)]
    assert (run.served["stays"].prefiller, run.served["stays"].failure) == (3, "")
    assert run.served["cancelled"].failure == "client disconnected"
    assert (run.served["other"].prefiller, run.served["other"].failure) == (2, "")


def test_a_joining_prefill_worker_takes_over_from_one_lost_while_sending() -> None:
    joins = Arrival(1_100, FLEET, joined("q", 5, role="prefill", pool="prefill"))
    lost = Arrival(60_000, FLEET, WorkerLost(owner_epoch=0, worker_id="p", worker_epoch=0))
    one = resumed(disaggregated("p", "d"), submit("r", CHAIN[:12]), joins, lost, hardware=LINKED).served["r"]
    # The fetch times out before the prompt is prefilled by the other worker.
    assert (one.prefiller, one.attempts, one.failure) == (2, 2, "")
    assert one.first_us > 10_000_000


def test_a_worker_of_inconsistent_sizes_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"worker a .*max_num_batched_tokens"):
        resumed(fleet("a", max_num_seqs=100), submit("r", CHAIN[:3]))
