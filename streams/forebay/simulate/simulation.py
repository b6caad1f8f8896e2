"""Simulation of one policy on one workload, starting with empty caches."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from sys import intern
from typing import cast

from xxhash import xxh3_64_intdigest

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.step import claim
from forebay.core.world import World
from forebay.events.base import U32_BYTES, U64_MASK
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.fleet import WorkerSpec
from forebay.events.pools import PoolRoutingConfigured
from forebay.events.requests import NO_HINTS, RequestSubmitted, RoutingHints, Sampling
from forebay.events.topics import CONTROL
from forebay.events.versions import EVENTS_VERSION
from forebay.simulate.arrivals import WorkloadArrivals
from forebay.simulate.cluster import OnArrived, SimulatedCluster
from forebay.simulate.delays import ROUTER, Hops
from forebay.simulate.outcome import SimulationOutcome
from forebay.simulate.planned import PlannedCluster, PlannedFleet, Planning, require_plannable
from forebay.simulate.rank import needs_reports
from forebay.simulate.settings import (
    PoolRole,
    PoolSettings,
    Settings,
    WorkerGroup,
    tiers_of,
    validate_settings,
    worker_id,
)
from forebay.simulate.tiers.fleet import store_name, tier_traffic
from forebay.simulate.worker_processes import US_PER_S, WorkerProcesses
from forebay.simulate.workload import Turn, Workload, sequence_hashes

OWNER_EPOCH = 0
ALLOCATIONS_PER_COLLECTION = 70_000  # 100 times the default of CPython


class Simulation:
    """Simulation of one policy on one workload. Create a new instance for each run."""

    def __init__(
        self,
        settings: Settings,
        router: RouterConfig,
        custom: CustomPolicies = ONLY_BUILT_IN,
        planning: Planning | None = None,
    ) -> None:
        """Build the simulated cluster, and schedule the configured starts and faults of workers.

        Args:
            router: routing configuration of every pool that has no `router` of its own.
            custom: custom policies that the routing configurations name.
            planning: planner that changes the sizes of pools during the run; None for no planner.
        """
        validate_settings(settings)
        if planning is not None:
            require_plannable(planning.settings, settings)
        self._settings = settings
        self._timeout_us = max(1, round(settings.timeout_s * US_PER_S))
        # msgspec omits a field only if it is the default object itself. In a child process the names would be other
        # objects and therefore be written to the digest.
        names = [(pool, intern(pool.name), intern(pool.model)) for pool in settings.pools]
        roles = [_role(pool) for pool in settings.pools]
        self._block_sizes = {model: pool.groups[0].engine.block_size for pool, _, model in names}
        self._model = names[0][2]
        world = World(custom)
        routers = [pool.router or router for pool in settings.pools]
        hops = Hops(settings.delays, settings.seed, ROUTER)
        reports = any(map(needs_reports, routers))
        kind = SimulatedCluster if planning is None else PlannedCluster
        self.cluster = kind(world, reports=reports, hops=hops, transfer=settings.transfer)
        measured = any(one.tier_credit == "measured" for one in routers)
        self._processes = WorkerProcesses(settings, self.cluster, OWNER_EPOCH, reports_costs=measured)
        by_name = {pool.name: pool for pool in settings.pools}
        self._planned: PlannedFleet | None = None
        if planning is not None and isinstance(self.cluster, PlannedCluster):
            self._planned = PlannedFleet(planning, self.cluster, self._processes, by_name, self._new)
        claim(world, OWNER_EPOCH, tuple(sorted(custom)), EVENTS_VERSION)
        for (pool, name, model), role, chosen in zip(names, roles, routers, strict=True):
            block_size = self._block_sizes[model]
            configured = PoolConfigured(pool=name, model=model, block_size=block_size, router=chosen, role=role)
            self.cluster.apply(CONTROL, configured)
            for group in pool.groups:
                for _ in range(group.count):
                    self._processes.begin(self._spec(pool, group), group)
        for start in sorted(settings.life.starts, key=lambda start: start.at_s):
            pool = by_name[start.pool]
            group = pool.groups[start.group]
            for _ in range(start.count):
                self._processes.start_at(round(start.at_s * US_PER_S), self._spec(pool, group), group)
        self._processes.plan_faults()
        for routed in settings.model_rules:
            self.cluster.apply(CONTROL, PoolRoutingConfigured(model=intern(routed.name), routing=routed.routing))
        if self._planned is not None:
            self._planned.begin()

    def run(self, workload: Workload, on_arrived: OnArrived) -> SimulationOutcome:
        """Play the whole workload and return the outcome. Raises ConfigError if a row cannot be played.

        `on_arrived` gets the number of requests that have arrived so far.
        """
        cluster, block_tokens = self.cluster, workload.block_tokens

        def submitted(turn: Turn) -> RequestSubmitted:
            return self._submitted(turn, block_tokens)

        with _infrequent_gc():
            cluster.play(WorkloadArrivals(workload.turns(), submitted), on_arrived)
        return SimulationOutcome(
            requests=cluster.requests,
            digest=cluster.digest(),
            workers=[worker.spec.worker_id for worker in self._processes.workers],
            pools=[worker.spec.pool for worker in self._processes.workers],
            prefill_workers=tuple(one.number for one in self._processes.workers if one.spec.role == "prefill"),
            gpu_s=self._processes.gpu_s(cluster.lasted_us),
            lasted_us=cluster.lasted_us,
            timeline=cluster.timeline(),
            planned=self._planned.intervals if self._planned is not None else [],
            tiers=tier_traffic(self._processes.tiers()),
        )

    def _new(self, pool: PoolSettings) -> tuple[WorkerSpec, WorkerGroup]:
        return self._spec(pool, pool.groups[0]), pool.groups[0]

    def _spec(self, pool: PoolSettings, group: WorkerGroup) -> WorkerSpec:
        return WorkerSpec(
            worker_id=worker_id(len(self._processes.workers)),
            model=intern(pool.model),
            block_size=group.engine.block_size,
            kv_blocks_total=group.engine.kv_blocks_total,
            max_num_seqs=group.engine.max_num_seqs,
            max_num_batched_tokens=group.engine.max_num_batched_tokens,
            pool=intern(pool.name),
            role=_role(pool),
            kv_store=intern(store_name(tiers_of(self._settings, group), pool.model)),
        )

    def _submitted(self, turn: Turn, block_tokens: int) -> RequestSubmitted:
        request_id = str(turn.number)
        model = turn.model or self._model
        block_size = self._block_sizes.get(model, block_tokens)
        return RequestSubmitted(
            request_id=request_id,
            model=model,
            token_ids=bytes(turn.prompt_tokens * U32_BYTES),
            sequence_hashes=sequence_hashes(turn, block_tokens, block_size),
            reply_slot=0,
            timeout_us=self._timeout_us,
            tie_seed=xxh3_64_intdigest(request_id.encode(), self._settings.seed & U64_MASK),
            sampling=Sampling(max_tokens=turn.output_tokens, ignore_eos=True),
            routing=RoutingHints(session_id=turn.session_id) if turn.session_id else NO_HINTS,
        )


def _role(pool: PoolSettings) -> PoolRole:
    """Return the interned role, because msgspec compares defaults by identity."""
    return cast(PoolRole, intern(pool.role))


@contextmanager
def _infrequent_gc() -> Iterator[None]:
    """Run the cyclic garbage collector 100 times less often: few cycles arise, and collecting takes some percent."""
    before = gc.get_threshold()
    gc.set_threshold(ALLOCATIONS_PER_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
