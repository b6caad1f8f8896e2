"""One policy on one trace: a fleet of equal workers that begin empty, and the requests of a trace."""

from collections.abc import Iterable, Iterator

from xxhash import xxh3_64_intdigest

from forebay.core.engine_model import EngineModel
from forebay.core.step import claim
from forebay.core.world import World
from forebay.events.base import U32_BYTES, U64_MASK, pack_u64
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.fleet import WorkerJoined, WorkerSpec
from forebay.events.requests import TIMEOUT_US_MAX, RequestSubmitted, Sampling
from forebay.events.topics import CONTROL, FLEET, REQUESTS
from forebay.simulate.cluster import Arrival, Cluster, OnArrived, needs_reports
from forebay.simulate.mooncake import Row
from forebay.simulate.outcome import Outcome
from forebay.simulate.rank import EngineRank
from forebay.simulate.settings import Settings

MODEL = "simulated"
POOL = "default"
OWNER_EPOCH = 0
US_PER_MS = 1_000


class Simulation:
    """One policy on one workload. Make one for each run."""

    def __init__(self, settings: Settings, router: RouterConfig) -> None:
        self._settings = settings
        world = World()
        self._cluster = Cluster(world, reports=needs_reports(router))
        claim(world, OWNER_EPOCH)
        pool = PoolConfigured(pool=POOL, model=MODEL, block_size=settings.block_size, router=router)
        self._cluster.apply(CONTROL, pool)
        config = settings.engine()
        for number in range(settings.workers):
            spec = WorkerSpec(
                worker_id=f"mock-{number}",
                model=MODEL,
                block_size=settings.block_size,
                kv_blocks_total=settings.blocks,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                pool=POOL,
            )
            worker_epoch = world.view.get(FLEET.name, 0)
            self._cluster.add(EngineRank(number, spec, 0, worker_epoch, EngineModel(config)))
            joined = WorkerJoined(owner_epoch=OWNER_EPOCH, spec=spec, lease=spec.worker_id, slot=number, from_offset=0)
            self._cluster.apply(FLEET, joined)

    def run(self, rows: Iterable[Row], on_arrived: OnArrived) -> Outcome:
        """Play the rows, which must be in the order of their timestamps; `on_arrived` gets how many did arrive."""
        self._cluster.play(self._arrivals(rows), on_arrived)
        return Outcome(list(self._cluster.served.values()), self._cluster.digest())

    def _arrivals(self, rows: Iterable[Row]) -> Iterator[Arrival]:
        settings = self._settings
        for number, row in enumerate(rows):
            request_id = str(number)
            submitted = RequestSubmitted(
                request_id=request_id,
                model=MODEL,
                token_ids=bytes(row.input_length * U32_BYTES),
                sequence_hashes=pack_u64(row.sequence_hashes(settings.block_size)),
                reply_slot=0,
                timeout_us=TIMEOUT_US_MAX,
                tie_seed=xxh3_64_intdigest(request_id.encode(), settings.seed & U64_MASK),
                sampling=Sampling(max_tokens=row.output_length, ignore_eos=True),
            )
            yield Arrival(round(row.timestamp * US_PER_MS / settings.speed), REQUESTS, submitted)
