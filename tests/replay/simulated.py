"""Logs of simulated runs, with the engines of the simulator."""

from collections.abc import Iterable
from functools import partial
from itertools import repeat
from typing import Any

from forebay.core.step import AnyDecision, InputEvent, claim
from forebay.core.world import CORE_VERSION, World
from forebay.engine_model.model import EngineConfig, EngineModel
from forebay.engine_model.timing import EngineTiming, MockerTiming
from forebay.events.base import Event
from forebay.events.codec import encode
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.decisions import JournalRecord, OwnerClaimed
from forebay.events.fleet import WorkerJoined, WorkerSpec
from forebay.events.requests import RequestSubmitted, Sampling
from forebay.events.topics import CONTROL, DECISIONS, FLEET, REQUESTS, Topic
from forebay.events.versions import EVENTS_VERSION
from forebay.simulate.arrivals import Arrival, ListedArrivals
from forebay.simulate.cluster import NO_TRANSFER, SimulatedCluster
from forebay.simulate.rank import EngineRank
from forebay.simulate.settings import PoolRole, Transfer
from forebay.simulate.tiers.fleet import TierFleet, store_name
from forebay.simulate.tiers.settings import FleetTiers
from forebay.simulate.workload import sequence_hashes
from forebay.simulate.workloads.rows import BLOCK_TOKENS, MooncakeRow
from tests.replay.recorded import MemoryLog
from tests.simulate.scene import turn_of

PREFILL: PoolRole = "prefill"
MODEL, POOL, BLOCK = "m", "default", 64
START_US = 1_000_000
MOCKER = MockerTiming()
TIMEOUT_US = 600_000_000


class RecordedRun(SimulatedCluster):
    """A cluster that records what its owner applies and decides."""

    def __init__(
        self,
        router: RouterConfig,
        workers: int,
        blocks: int = 16_384,
        timing: EngineTiming = MOCKER,
        *,
        prefill: int = 0,
        transfer: Transfer = NO_TRANSFER,
        tiers: FleetTiers = FleetTiers(),  # noqa: B008 - frozen
    ) -> None:
        """Create the fleet. The first `prefill` workers prefill prompts for the others."""
        world = World()
        super().__init__(world, reports=False, transfer=transfer)
        self.log = MemoryLog()
        claimed = OwnerClaimed(owner_id="o", core_version=CORE_VERSION, events_version=EVENTS_VERSION)
        self._append(DECISIONS, claimed)
        claim(world, 0, events_version=EVENTS_VERSION)
        self.now_us = START_US
        decoding_role: PoolRole = "decode" if prefill else "aggregated"
        roles: list[PoolRole] = [*repeat(PREFILL, prefill), *repeat(decoding_role, workers - prefill)]
        for role in dict.fromkeys(roles):
            name = role if role == "prefill" else POOL
            pool = PoolConfigured(pool=name, model=MODEL, block_size=BLOCK, router=router, role=role)
            self.apply(CONTROL, pool)
        tier_fleet = TierFleet(self, reports_costs=False)
        for number, role in enumerate(roles):
            spec = WorkerSpec(
                pool=role if role == "prefill" else POOL,
                role=role,
                worker_id=f"w{number}",
                model=MODEL,
                block_size=BLOCK,
                kv_blocks_total=blocks,
                max_num_seqs=256,
                max_num_batched_tokens=8_192,
                kv_store=store_name(tiers, MODEL),
            )
            config = EngineConfig(vocabulary=None, block_size=BLOCK, kv_blocks_total=blocks, timing=timing)
            block_bytes = BLOCK * transfer.kv_bytes_per_token
            own = tier_fleet.build(tiers, MODEL, config, block_bytes, partial(self._changed, number))
            engine = EngineModel(config) if own is None else own.engine
            self.add(EngineRank(number, spec, 0, world.view.get(FLEET.name, 0), engine, tiers=own))
            self.apply(FLEET, WorkerJoined(owner_epoch=0, spec=spec, lease="l", slot=number, from_offset=0))

    def _changed(self, number: int, is_loaded: bool) -> None:
        self.tiers_changed(self.ranks[number], is_loaded=is_loaded)

    def derive(self, topic: Topic, event: InputEvent) -> list[AnyDecision]:
        self._append(topic, event)
        return super().derive(topic, event)

    def journal(self, record: JournalRecord) -> None:
        super().journal(record)
        self._append(DECISIONS, record)

    def _append(self, topic: Topic, event: Event) -> None:
        self.log.topics.setdefault(topic.name, []).append(encode(topic, event))


def played(
    rows: Iterable[MooncakeRow],
    router: RouterConfig,
    workers: int,
    blocks: int = 16_384,
    name: str = "r",
    timing: EngineTiming = MOCKER,
    **disagg: Any,
) -> RecordedRun:
    """Return a run of a trace and its log. Request IDs begin with `name`; `disagg` is passed on to `RecordedRun`."""
    run = RecordedRun(router, workers, blocks, timing, **disagg)
    run.play(
        ListedArrivals(_arrival(f"{name}{number}", number, row) for number, row in enumerate(rows)), lambda _: None
    )
    run.digest()
    return run


def _arrival(request_id: str, number: int, row: MooncakeRow) -> Arrival:
    submitted = RequestSubmitted(
        request_id=request_id,
        model=MODEL,
        token_ids=b"",
        withheld_tokens=row.input_length,
        sequence_hashes=sequence_hashes(turn_of(row, number), BLOCK_TOKENS, BLOCK),
        reply_slot=0,
        timeout_us=TIMEOUT_US,
        tie_seed=number,
        nonce=number,
        sampling=Sampling(max_tokens=row.output_length),
    )
    return Arrival(START_US + round(row.timestamp * 1_000), REQUESTS, submitted)
