"""What an owner shows to Prometheus, read from its state when asked."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from forebay.core.phases import Phase
from forebay.core.state.prefix_index import APPLIED
from forebay.events.decisions import PrefillReason, Stage
from forebay.live.owner.owner import Owner
from forebay.live.owner.ttft_metrics import BUCKETS_S, Times
from forebay.live.router.placement import Placement
from forebay.transport.directory import Directory

# Counts of the world with series of their own; all others are of events that changed nothing.
OUTCOMES = ("rejected_", "aborted_", "kv_released_", "command_", "non_max_overlap_selections", "overlap_blocks_lost")

# Reasons to compute a prompt where it is answered; the others send it away.
KEPT = frozenset({"never", "short_prompt", "prefill_busy", "no_prefill_worker", "failed", "begun"})


class OwnerMetrics(Collector):
    """Names are Dynamo's where it has the same thing."""

    def __init__(self, owner: Owner, model: str) -> None:
        self._owner = owner
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        yield from self._owned()
        yield from self._routed()
        yield from self._first_tokens()
        yield from self._indexed()
        yield from self._models()
        yield from self._per_worker()

    def _owned(self) -> Iterator[Metric]:
        owner = self._owner
        journal, snapshots = owner.journal, owner.snapshots
        yield self._counter("forebay_owner_journal_records", "journal records written", journal.written)
        yield self._counter("forebay_owner_void_records", "void records met in the journal", journal.void)
        foreign = "records met in the journal that no owner wrote"
        yield self._counter("forebay_owner_foreign_records", foreign, journal.foreign)
        yield self._counter("forebay_owner_dead_letters", "records that were refused", owner.letters)
        yield self._counter("forebay_owner_unsent_records", "effects that no topic takes", owner.unsent)
        yield self._gauge("forebay_owner_clock_ahead_seconds", "the log's clock at start", owner.clock_ahead_us / 1e6)
        yield self._counter("forebay_owner_snapshots", "snapshots that the journal names", snapshots.taken)
        yield self._counter("forebay_owner_digests", "digests of the state in the journal", snapshots.digests)
        age = "time since the newest snapshot's state, or since the start"
        yield self._gauge("forebay_owner_snapshot_age_seconds", age, snapshots.age_s)
        admission = owner.admission
        refused = admission.refused if admission is not None else {}
        faults = 0 if admission is None else admission.sensor_faults
        ingresses = len(owner.world.fleet.ingresses())
        yield self._gauge("forebay_owner_ingresses", "ingresses that have leases", ingresses)
        yield self._counter("forebay_owner_lease_faults", "times that the leases of the group failed together", faults)
        yield self._counts("forebay_owner_workers_refused", "workers turned away", refused)

    def _routed(self) -> Iterator[Metric]:
        world = self._owner.world
        counts = world.counts
        yield self._counter("dynamo_component_router_requests", "requests routed", sum(world.turns.values()))
        yield self._gauge("forebay_owner_requests_under_way", "requests under way", len(world.requests))
        yield from self._parts()
        ignored = {name: count for name, count in counts.items() if not name.startswith(OUTCOMES)}
        yield self._counts("forebay_owner_events", "events that changed nothing, by reason", ignored)
        yield self._counts("forebay_router_requests_rejected", "requests refused", _of(counts, "rejected_"))
        yield self._counts("forebay_router_requests_aborted", "requests given up", _of(counts, "aborted_"))
        text = "KV that nobody was to fetch any more, given back by who kept it"
        yield self._counts("forebay_router_kv_released", text, _of(counts, "kv_released_"))
        yield self._gauge("forebay_owner_commands_under_way", "commands under way", len(world.commands))
        yield self._counts("forebay_owner_commands", "commands by what became of them", _of(counts, "command_"))
        selections = counts["non_max_overlap_selections"]
        passed_over = "requests sent elsewhere than where most of them was cached"
        yield self._counter("dynamo_component_router_non_max_overlap_selections", passed_over, selections)
        # Dynamo has a histogram of it: its count and sum have these names, too.
        lost = SummaryMetricFamily(
            "dynamo_component_router_overlap_blocks_lost", "cached blocks passed over by those", labels=["model"]
        )
        lost.add_metric([self._model], selections, counts["overlap_blocks_lost"])
        yield lost
        labels = ["model", "pool", "policy_class", "uncached_tokens_min"]
        pending = GaugeMetricFamily(
            "dynamo_frontend_router_queue_pending_requests", "requests that wait in the router", labels=labels
        )
        for name, pool in sorted(world.pools.items()):
            for kind in pool.router.queue.classes:
                label = [self._model, name, kind.name, str(kind.uncached_tokens_min)]
                pending.add_metric(label, world.queues.length(name, kind))
        yield pending

    def _parts(self) -> Iterator[Metric]:
        """What is routed and where requests are, by the parts that they are served in."""
        owner = self._owner
        phases = Counter(str(request.phase) for request in owner.world.requests.active())
        labels = ["model", "phase"]
        under_way = GaugeMetricFamily("forebay_owner_requests", "requests under way, by phase", labels=labels)
        for phase in Phase:
            under_way.add_metric([self._model, phase], phases[phase])
        yield under_way
        stages = CounterMetricFamily(
            "forebay_router_stages", "requests sent to workers by this owner, by stage", labels=["model", "stage"]
        )
        for stage in get_args(Stage):
            stages.add_metric([self._model, stage], owner.stages[stage])
        yield stages
        text = "where prompts of a decode pool's requests were sent to be computed, and why"
        places = CounterMetricFamily("forebay_router_prefills", text, labels=["model", "place", "reason"])
        # From the start, so that the first one is seen as a rise.
        known = (
            [("local" if one in KEPT else "remote", one) for one in get_args(PrefillReason)] if self._apart() else []
        )
        for place, reason in sorted({*known, *owner.prefills}):
            places.add_metric([self._model, place, reason], owner.prefills[place, reason])
        yield places

    def _first_tokens(self) -> Iterator[Metric]:
        """Of prompts that are computed elsewhere; nothing while no pool would fetch them."""
        if not self._apart():
            return
        found = self._owner.first_tokens
        text = "from the end of a prompt's prefill by another worker to its first token"
        since = HistogramMetricFamily("forebay_router_prefill_to_first_token_seconds", text, labels=["model"])
        since.add_metric([self._model], _buckets(found.since_prefill), found.since_prefill.sum_us / 1e6)
        yield since
        text = "what the time to first token of such prompts is made of"
        labels = ["model", "part"]
        parts = HistogramMetricFamily("forebay_router_time_to_first_token_part_seconds", text, labels=labels)
        for part, times in found.parts.items():
            parts.add_metric([self._model, part], _buckets(times), times.sum_us / 1e6)
        yield parts
        text = "bytes of KV that prefill workers kept for requests whose first token came"
        yield self._counter("forebay_router_kv_kept_bytes", text, found.kept_bytes)
        text = "bytes of these that decode workers fetched: the rest was in their caches"
        yield self._counter("forebay_router_kv_fetched_bytes", text, found.fetched_bytes)

    def _apart(self) -> bool:
        pools = self._owner.world.pools.values()
        return any(pool.role == "decode" and pool.model == self._model for pool in pools)

    def _indexed(self) -> Iterator[Metric]:
        index = self._owner.world.index
        yield self._counts("dynamo_component_kv_cache_events_refused", "KV events by what was odd", index.counts)
        # Dynamo's name has no `_total`, which a counter would get.
        applied = UnknownMetricFamily(
            "dynamo_component_kv_cache_events_applied", "KV events applied", labels=["model", "event_type", "status"]
        )
        orphans = index.counts["unknown_parent"]
        for kind in APPLIED.values():
            applied.add_metric([self._model, kind, "ok"], index.applied[kind] - (orphans if kind == "stored" else 0))
        applied.add_metric([self._model, "stored", "parent_block_not_found"], orphans)
        yield applied

    def _models(self) -> Iterator[Metric]:
        """What one worker of the model offers: the first by name."""
        for worker in self._owner.world.fleet.workers()[:1]:
            spec = worker.spec
            yield self._gauge("dynamo_frontend_model_total_kv_blocks", "KV blocks of a worker", spec.kv_blocks_total)
            yield self._gauge("dynamo_frontend_model_max_num_seqs", "sequences of a worker", spec.max_num_seqs)
            tokens = "tokens of one step of a worker"
            yield self._gauge("dynamo_frontend_model_max_num_batched_tokens", tokens, spec.max_num_batched_tokens)
            yield self._gauge("dynamo_frontend_model_kv_cache_block_size", "tokens of a KV block", spec.block_size)

    def _per_worker(self) -> Iterator[Metric]:
        world = self._owner.world
        labels = ["worker_id", "dp_rank"]
        typed = [*labels, "worker_type"]
        blocks = GaugeMetricFamily("dynamo_frontend_worker_active_decode_blocks", "active KV blocks", labels=typed)
        prefill = GaugeMetricFamily("dynamo_frontend_worker_active_prefill_tokens", "tokens to prefill", labels=typed)
        roles = {worker.spec.worker_id: worker.spec.role for worker in world.fleet.workers()}
        held = GaugeMetricFamily("forebay_index_blocks", "device blocks in the prefix index", labels=labels)
        for load in world.load.ranks():
            worker_id, rank = load.worker_id, load.rank
            label = [worker_id, str(rank)]
            blocks.add_metric([*label, roles[worker_id]], load.decode_blocks)
            prefill.add_metric([*label, roles[worker_id]], load.prefill_tokens)
            held.add_metric(label, world.index.blocks_held(worker_id, rank, "device"))
        yield from (blocks, prefill, held)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model"])
        family.add_metric([self._model], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model"])
        family.add_metric([self._model], value)
        return family

    def _counts(self, name: str, text: str, counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model", "reason"])
        for reason, count in sorted(counts.items()):
            family.add_metric([self._model, reason], count)
        return family


def _buckets(times: Times) -> list[tuple[str, float]]:
    return list(zip([*map(str, BUCKETS_S), "+Inf"], accumulate(times.buckets), strict=True))


def _of(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in counts.items() if name.startswith(prefix)}


class PlacementMetrics(Collector):
    """The directory of groups, as the owner of control partition 0 sees it."""

    def __init__(self, placement: Placement, directory: Directory) -> None:
        self._placement = placement
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        groups = self._directory.groups
        yield GaugeMetricFamily("forebay_groups", "groups that have a partition", value=len(groups.partitions))
        refused = self._placement.refused
        yield CounterMetricFamily("forebay_groups_refused", "groups that found no free partition", value=refused)
        ignored = CounterMetricFamily("forebay_placements_ignored", "placements without effect", labels=["reason"])
        for reason, count in sorted({**groups.ignored, "undecodable": self._directory.undecodable}.items()):
            ignored.add_metric([reason], count)
        yield ignored
