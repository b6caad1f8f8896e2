"""What an owner shows to Prometheus, read from its state when asked: nothing is counted on the way."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.core.groups import Groups
from forebay.live.owner import Owner
from forebay.live.placement import Placement


class OwnerMetrics(Collector):
    """Names are Dynamo's where it has the same thing."""

    def __init__(self, owner: Owner, model: str) -> None:
        self._owner = owner
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        world = self._owner.world
        routed = CounterMetricFamily("dynamo_component_router_requests", "requests routed", labels=["model"])
        routed.add_metric([self._model], sum(world.turns.values()))
        yield routed
        records = CounterMetricFamily("forebay_owner_journal_records", "journal records written", labels=["model"])
        records.add_metric([self._model], self._owner.journal.written)
        yield records
        void = CounterMetricFamily("forebay_owner_void_records", "void records met in the journal", labels=["model"])
        void.add_metric([self._model], self._owner.journal.void)
        yield void
        foreign = CounterMetricFamily(
            "forebay_owner_foreign_records", "records met in the journal that no owner wrote", labels=["model"]
        )
        foreign.add_metric([self._model], self._owner.journal.foreign)
        yield foreign
        letters = CounterMetricFamily("forebay_owner_dead_letters", "records that were refused", labels=["model"])
        letters.add_metric([self._model], self._owner.letters)
        yield letters
        unsent = CounterMetricFamily("forebay_owner_unsent_records", "effects that no topic takes", labels=["model"])
        unsent.add_metric([self._model], self._owner.unsent)
        yield unsent
        ahead = GaugeMetricFamily("forebay_owner_clock_ahead_seconds", "the log's clock at start", labels=["model"])
        ahead.add_metric([self._model], self._owner.clock_ahead_us / 1e6)
        yield ahead
        yield self._counts("forebay_owner_events", "events that changed nothing, by reason", world.counts)
        yield self._counts("dynamo_component_kv_cache_events_refused", "KV events by what was odd", world.index.counts)
        admission = self._owner.admission
        refused = admission.refused if admission is not None else {}
        yield self._counts("forebay_owner_workers_refused", "workers turned away", refused)
        under_way = GaugeMetricFamily("forebay_owner_requests_under_way", "requests under way", labels=["model"])
        under_way.add_metric([self._model], len(world.requests))
        yield under_way
        yield from self._per_worker()

    def _per_worker(self) -> Iterator[Metric]:
        world = self._owner.world
        labels = ["worker_id", "dp_rank"]
        blocks = GaugeMetricFamily("dynamo_frontend_worker_active_decode_blocks", "active KV blocks", labels=labels)
        prefill = GaugeMetricFamily("dynamo_frontend_worker_active_prefill_tokens", "tokens to prefill", labels=labels)
        held = GaugeMetricFamily("forebay_index_blocks", "device blocks in the prefix index", labels=labels)
        for (worker_id, rank), load in world.load.loads([]).items():
            label = [worker_id, str(rank)]
            blocks.add_metric(label, load.decode_blocks)
            prefill.add_metric(label, load.prefill_tokens)
            held.add_metric(label, world.index.blocks_held(worker_id, rank, "device"))
        yield from (blocks, prefill, held)

    def _counts(self, name: str, text: str, counts: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model", "reason"])
        for reason, count in sorted(counts.items()):
            family.add_metric([self._model, reason], count)
        return family


class PlacementMetrics(Collector):
    """The directory of groups, as the owner of control partition 0 sees it."""

    def __init__(self, placement: Placement, groups: Groups) -> None:
        self._placement = placement
        self._groups = groups

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        yield GaugeMetricFamily("forebay_groups", "groups that have a partition", value=len(self._groups.partitions))
        refused = self._placement.refused
        yield CounterMetricFamily("forebay_groups_refused", "groups that found no free partition", value=refused)
        ignored = CounterMetricFamily("forebay_placements_ignored", "placements without effect", labels=["reason"])
        for reason, count in sorted(self._groups.ignored.items()):
            ignored.add_metric([reason], count)
        yield ignored
