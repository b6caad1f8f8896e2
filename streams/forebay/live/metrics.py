"""What an owner shows to Prometheus, read from its state when asked: nothing is counted on the way."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.live.owner import Owner


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
        records.add_metric([self._model], self._owner.records_written)
        yield records
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
