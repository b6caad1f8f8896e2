"""World: the complete state of a group's owner, with its clock and the next offset to apply of every input topic.

Only `forebay.core.step` changes a world. The digest covers the whole state. A world restored from a snapshot has the
same digest, and makes the same decisions from there on.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypedDict

from forebay.core.queue_entry import queued_request
from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.plan import Plan
from forebay.core.routing.policies import BUILT_IN, ONLY_BUILT_IN, CustomPolicies, Policy, PolicyMissing
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.adapters import AdapterCatalog
from forebay.core.state.commands import PendingCommands
from forebay.core.state.fleet import Fleet, FleetWorker
from forebay.core.state.load import FleetLoad
from forebay.core.state.pool_settings import PoolSettings, is_allowed
from forebay.core.state.predicted_cache import RoutedIndex
from forebay.core.state.prefix_index import PrefixIndex
from forebay.core.state.queue import Queues
from forebay.core.state.rank_load import kv_blocks_of
from forebay.core.state.requests import ActiveRequests
from forebay.core.state.roster import CandidateRank, Roster, roster_of, session_roster
from forebay.core.state.sessions import Binding, SessionAffinity
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.core.state_machine import Digested, digest_of, plain
from forebay.events.base import U64_MASK
from forebay.events.control import PoolConfigured, PoolSetting, RouterConfig
from forebay.events.decisions import ConsumedRun
from forebay.events.fleet import WorkerLost
from forebay.events.snapshots import Chunk, PoolTurns, WorldState
from forebay.events.versions import EVENTS_VERSION, TENANTS_SINCE

CORE_VERSION = 1  # raised whenever the same events lead to different decisions


class Stamp(TypedDict):
    """Fields that every journal record has."""

    owner_epoch: int
    seq: int
    consumed: tuple[ConsumedRun, ...]
    owner_nonce: str


class World:
    """Complete state of the owner of one group.

    Attributes:
        sessions: worker rank of each session.
        routed: blocks assumed to be cached on ranks without KV events.
        predicted: blocks assumed to be cached until KV events arrive.
        settings: configurations of pools, changes by operators, and rules by which pools are chosen.
        pools: `settings.pools`, the configuration by pool with the router mode in effect.
        view: next offset to apply, by input topic.
        consumed: runs of events applied since the last decision. The next decision's journal record contains them.
        turns: number of routed requests per pool.
        owner_epoch: offset of the owner's claim; -1 before the first.
        owner_nonce: random text in the owner's claim.
        owner_policies: custom policies that the owner's operator allowed, sorted. The owner uses no others.
        owner_events: version of the event types that the owner can read. Events of later types have no effect.
        custom: classes of custom policies that this process may run. Not part of the state.
        seq: sequence number of the next decision.
        replanning: accepted requests to route again at the end of the current event, before the queues are served; None
            if the event changes no plan. It is always None between two events.
        counts: counters for diagnostics; not part of the state.
        on_plan: called with every plan before it is booked; None for no call. The function may read the world and must
            not change it. Not part of the state.
        on_loss: called with every lost worker while its requests and cache are still in the state, under the same
            conditions as `on_plan`.
    """

    def __init__(self, custom: CustomPolicies = ONLY_BUILT_IN) -> None:
        self.custom = custom
        self.fleet = Fleet()
        self.index = PrefixIndex()
        self.load = FleetLoad()
        self.requests = ActiveRequests()
        self.queues = Queues()
        self.sessions = SessionAffinity()
        self.routed = RoutedIndex()
        self.predicted = RoutedIndex()
        self.commands = PendingCommands()
        self.adapters = AdapterCatalog()
        self.settings = PoolSettings()
        self.pools = self.settings.pools
        self.view: dict[str, int] = {}
        self.consumed: list[ConsumedRun] = []
        self.now_us = 0
        self.turns: dict[str, int] = {}
        self.owner_epoch = -1
        self.owner_nonce = ""
        self.owner_policies: tuple[str, ...] = ()
        self.owner_events = EVENTS_VERSION
        self.seq = 0
        self.replanning: list[ActiveRequest] | None = None
        self.counts: Counter[str] = Counter()
        self.on_plan: Callable[[Plan], None] | None = None
        self.on_loss: Callable[[WorkerLost, FleetWorker], None] | None = None
        self._rosters: dict[str, Roster] = {}

    def note(self, topic: str, count: int, now_us: int) -> None:
        """Set the clock to `now_us`, and record that the next `count` records of `topic` are applied at this time."""
        assert now_us >= self.now_us, "the clock never runs backwards"
        self.now_us = now_us
        self.view[topic] = self.view.get(topic, 0) + count
        consumed = self.consumed
        if consumed and (last := consumed[-1]).topic == topic and last.now_us == now_us:
            consumed[-1] = ConsumedRun(topic=topic, count=last.count + count, now_us=now_us)
            return
        consumed.append(ConsumedRun(topic=topic, count=count, now_us=now_us))

    def replan(self, requests: Iterable[ActiveRequest] = ()) -> None:
        """Serve the queues at the end of the current event, after `requests` in the phase `waiting` have been routed.

        Call this whenever a rank may have got room, or a request a rank.
        """
        if self.replanning is None:
            self.replanning = []
        self.replanning += requests

    def take_consumed(self) -> tuple[ConsumedRun, ...]:
        """Return the runs of events since the last decision, and start a new list."""
        runs, self.consumed = tuple(self.consumed), []
        return runs

    def stamp(self) -> Stamp:
        """Return the owner, sequence number and consumed events for the next journal record, and count the record."""
        self.seq += 1
        return {
            "owner_epoch": self.owner_epoch,
            "seq": self.seq - 1,
            "consumed": self.take_consumed(),
            "owner_nonce": self.owner_nonce,
        }

    def policy(self, mode: str, *, as_owner: bool = True) -> type[Policy]:
        """Return the policy class of a router mode: a built-in name, or the dotted path of a custom policy.

        If the owner makes the decision (`as_owner`), its operator must have allowed the policy. A comparison, for
        example, may use any. Raises Ineligible if the operator did not allow the policy, and PolicyMissing if the
        policy may be used, but this process does not have its class.
        """
        if (built_in := BUILT_IN.get(mode)) is not None:
            return built_in
        if as_owner and not is_allowed(mode, self.owner_policies):
            text = (
                f"the policy {mode} is not allowed on this router; its operator can start it with --allow-policy {mode}"
            )
            raise Ineligible("policy_failed", text)
        if mode not in self.custom:
            raise PolicyMissing(
                f"the log names the policy {mode}; to import and run this class, pass --allow-policy {mode}"
            )
        return self.custom[mode]

    def pool_of(self, model: str) -> PoolConfigured | None:
        """Return the first pool, by name, that generates responses for `model`, or None if there is none."""
        pools = self.responding_pools(model)
        return pools[0] if pools else None

    def responding_pools(self, model: str) -> list[PoolConfigured]:
        """Return the pools of one role that generate responses for `model`, in order of their names.

        If a model has both aggregated and decode pools, pools with a ready worker take precedence. So an operator can
        replace one kind of pool by the other.
        """
        pools = [pool for pool in self._pools(model) if pool.role in ("aggregated", "decode")]
        if len({pool.role for pool in pools}) > 1:
            pools = [pool for pool in pools if self.roster(pool.pool).ranks] or pools
        return [pool for pool in pools if pool.role == pools[0].role]

    def encoders_of(self, model: str) -> tuple[PoolConfigured, Roster] | None:
        """Return the first encode pool by name that has a ready worker, and its ready ranks; None if there is none."""
        for pool in self._pools(model):
            if pool.role == "encode" and (roster := self.roster(pool.pool)).ranks:
                return pool, roster
        return None

    def prefillers_of(self, decoders: PoolConfigured) -> PoolConfigured | None:
        """Return the prefill pool that computes prompts for the decode pool `decoders`, or None if there is none.

        It has a ready worker, the same model, and the same block size, because the ingress hashes a prompt for one
        block size. If several pools qualify, it is the first by name.
        """
        return next((pool for pool in self.prefill_pools(decoders) if self.roster(pool.pool).ranks), None)

    def prefill_pools(self, decoders: PoolConfigured) -> list[PoolConfigured]:
        """Return the prefill pools with the model and block size of the pool `decoders`, in order of their names."""
        pools = self._pools(decoders.model)
        return [pool for pool in pools if pool.role == "prefill" and pool.block_size == decoders.block_size]

    def _pools(self, model: str) -> Iterator[PoolConfigured]:
        return (self.pools[name] for name in sorted(self.pools) if self.pools[name].model == model)

    def set_pools(self, event: PoolSetting) -> None:
        """Apply a change of the settings of pools. A change without effect is only counted."""
        if isinstance(event, PoolConfigured) and self.owner_events < TENANTS_SINCE:
            event = event.without_class_timeouts()  # the owner did not know the field
        known = self.pools.get(event.pool) if isinstance(event, PoolConfigured) else None
        no_effect = self.settings.apply(event, self.owner_policies)
        if no_effect is not None:
            self.counts[no_effect] += 1
        if not isinstance(event, PoolConfigured):
            return
        self.queues.configure(event.pool, event.router.queue)
        if known is not None and known.role != event.role:
            for request in self.requests.queued():
                if request.submitted.pool == event.pool:
                    self.queues.remove(request.submitted.request_id)
                    self.queues.push(event.pool, queued_request(request, event))

    def strand_waiting(self) -> None:
        """Note which accepted requests wait for an adapter of the catalog, because the catalog has changed."""
        for request in self.requests.waiting():
            self.adapters.strand(request)

    def roster(self, pool: str) -> Roster:
        roster = self._rosters.get(pool)
        if roster is None:
            roster = self._rosters[pool] = roster_of(pool, self.fleet, self.load)
        return roster

    def forget_rosters(self) -> None:
        """Drop the cached rosters, because the fleet has changed."""
        self._rosters.clear()

    def admit(self, worker: FleetWorker) -> None:
        """Add the ranks of a worker that has joined, with empty caches and without load."""
        worker_id = worker.spec.worker_id
        self.index.use_store(worker_id, worker.spec.kv_store)
        self.adapters.sync(worker_id, worker.spec.loras, self.now_us)
        for rank in worker.spec.ranks:
            self.index.add_holder(worker_id, rank, worker.worker_epoch)
            self.load.add_rank(worker_id, rank, worker.spec.block_size, kv_blocks_of(worker.spec), self.now_us)
            self.routed.add_holder(worker_id, rank)
            self.predicted.add_holder(worker_id, rank)

    def dismiss(self, worker: FleetWorker) -> None:
        """Remove the ranks and sessions of a lost worker. The caller must have freed its requests."""
        worker_id = worker.spec.worker_id
        self.index.use_store(worker_id, "")
        self.adapters.sync(worker_id, (), self.now_us)
        for rank in worker.spec.ranks:
            self.index.drop_holder(worker_id, rank)
            self.load.drop_rank(worker_id, rank)
            self.routed.drop_holder(worker_id, rank)
            self.predicted.drop_holder(worker_id, rank)
        self.sessions.drop_worker(worker_id)

    def forget_routed(self, worker_id: str, rank: int) -> None:
        """Drop all blocks that a rank is assumed to have cached, because its cache was cleared."""
        for routed in (self.routed, self.predicted):
            routed.drop_holder(worker_id, rank)
            routed.add_holder(worker_id, rank)

    def book_routing(self, router: RouterConfig, candidate: CandidateRank, request: SubmittedRequest) -> None:
        """Record the effects of a routing decision on later decisions, except its load.

        The rank will probably have the prompt cached. If the request has a session, the rank serves it from now on.
        """
        worker_id, rank = candidate.key
        self.adapters.use(request.lora_name, worker_id, self.now_us)
        if not (router.use_kv_events and candidate.worker.spec.kv_events):
            self._assume(router, worker_id, rank, request.blocks)
        elif router.predicted_ttl_s:
            due_us = self.now_us + round(router.predicted_ttl_s * 1e6)
            self.predicted.add(worker_id, rank, request.blocks, due_us, router.approximate_blocks_max)
        session_id = request.hints.session_id
        if session_id and router.session_ttl_s:
            due_us = self.now_us + round(router.session_ttl_s * 1e6)
            bound = self.sessions.find(request.pool, session_id)
            if bound is None or request.hints.worker_id or session_roster(self.roster(request.pool), bound) is None:
                bound = Binding(worker_id, candidate.worker.worker_epoch, rank)
            self.counts["sessions_evicted"] += self.sessions.bind(request.pool, session_id, bound, due_us)

    def _assume(
        self, router: RouterConfig, worker_id: str, rank: int, blocks: Sequence[int], *, computed: bool = False
    ) -> None:
        due_us = self.now_us + round(router.ttl_s * 1e6)
        self.routed.add(worker_id, rank, blocks, due_us, router.approximate_blocks_max, computed=computed)

    def note_computed(self, request: ActiveRequest) -> None:
        """Note that the worker to which a request was last routed has computed its prompt, and so has it cached."""
        worker = self.fleet.get(request.worker_id)
        assert worker is not None, "the request leaves a worker that leaves the fleet"
        self.fleet.accept(request.worker_id)
        router = self.pools[worker.spec.pool].router
        if not (router.use_kv_events and worker.spec.kv_events):
            self._assume(router, request.worker_id, request.rank, request.submitted.blocks, computed=True)

    def withdraw_routing(self, request: ActiveRequest) -> None:
        """Withdraw the assumption that this worker has cached the prompt, because it has not computed the prompt."""
        for routed in (self.routed, self.predicted):
            routed.withdraw(request.worker_id, request.rank, request.submitted.blocks)

    def next_due_us(self) -> int | None:
        """Return when the state next changes by time alone, in microseconds on the owner's clock, or None for never."""
        due_us = self.requests.next_due_us()
        avoided_us = self.fleet.next_due_us() if self.fleet.avoided else None
        for other_us in (self.commands.next_due_us(), avoided_us, self.adapters.next_due_us()):
            if other_us is not None and (due_us is None or other_us < due_us):
                due_us = other_us
        return due_us

    def expire(self) -> None:
        """Remove assumed blocks, sessions, pauses of workers, and remembered command ids and keys whose time is over.

        The core calls this only when it applies an event or a deadline, because other times are not on the log.
        """
        self.routed.expire(self.now_us)
        self.predicted.expire(self.now_us)
        self.sessions.expire(self.now_us)
        self.commands.expire(self.now_us)
        self.requests.expire_keys(self.now_us)
        if self.fleet.avoided:
            self.fleet.expire(self.now_us)

    def machines(self) -> tuple[Digested, ...]:
        return (
            self.fleet,
            self.index,
            self.load,
            self.requests,
            self.queues,
            self.sessions,
            self.routed,
            self.predicted,
            self.commands,
        )

    def digest(self) -> int:
        """Return a 64-bit digest over the complete state. Equal worlds have equal digests."""
        return self.digest_with(self.index)

    def digest_with(self, index: Digested) -> int:
        """Return the digest that the world would have with `index` in place of its own prefix index."""
        digests = [(index if machine is self.index else machine).digest() for machine in self.machines()]
        settings = self.settings.snapshot()
        rest = digest_of(
            digests,
            plain(settings["pools"]),
            plain(settings["busy"]),
            plain(settings["disagg"]),
            sorted(self.view.items()),
            sorted(self.turns.items()),
            self.owner_policies,
            self.now_us,
            plain(settings["policies"]),
        )
        return (rest + self.settings.digest_of_rules() + self.adapters.digest()) & U64_MASK

    def snapshot(self) -> Iterator[Chunk]:
        """Yield the complete state as snapshot parts. `consumed` must be empty."""
        return self._facts(self.index.snapshot())

    def snapshot_small(self) -> Iterator[Chunk]:
        """Yield the state as snapshot parts, without the blocks of the prefix index.

        There may be millions of blocks, so the owner copies them in steps (`PrefixIndex.begin_scan`).
        """
        return self._facts(self.index.cursors())

    def _facts(self, index: Iterable[Chunk]) -> Iterator[Chunk]:
        assert self.replanning is None and not self.consumed, "a snapshot is taken between journal records"
        yield WorldState(
            now_us=self.now_us,
            view=tuple(ConsumedRun(topic=topic, count=count, now_us=0) for topic, count in sorted(self.view.items())),
            turns=tuple(PoolTurns(pool=pool, turns=turns) for pool, turns in sorted(self.turns.items())),
            owner_epoch=self.owner_epoch,
            owner_policies=self.owner_policies,
            owner_events=self.owner_events,
            owner_nonce=self.owner_nonce,
            fleet_epoch=self.fleet.owner_epoch,
            seq=self.seq,
            **self.settings.snapshot(),
        )
        yield from self.fleet.snapshot()
        yield from index
        yield from self.requests.snapshot()
        yield from self.load.snapshot()
        yield from self.queues.snapshot()
        yield from self.sessions.snapshot()
        yield from self.routed.snapshot(predicted=False)
        yield from self.predicted.snapshot(predicted=True)
        yield from self.commands.snapshot()
        yield from self.adapters.snapshot()
