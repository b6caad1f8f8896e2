"""Prometheus metrics of an owner, read from its state at each scrape."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, get_args

from prometheus_client.core import HistogramMetricFamily, Metric, SummaryMetricFamily, UnknownMetricFamily
from prometheus_client.registry import Collector

from forebay.core.phases import Phase
from forebay.core.state.prefix_index import APPLIED
from forebay.events.decisions import PrefillReason, Stage
from forebay.live.owner.owner import Owner
from forebay.live.owner.ttft_metrics import BUCKETS_S, DurationHistogram
from forebay.runtime.metrics import counter, gauge

# Prefixes of the counts in `World.counts` that have their own metrics. All other counts are of events without effect.
OUTCOMES = ("rejected_", "aborted_", "kv_released_", "command_", "non_max_overlap_selections", "overlap_blocks_lost")

# Reasons for local prefill, by the decode worker. All other reasons lead to remote prefill.
LOCAL_REASONS = frozenset({"never", "short_prompt", "prefill_busy", "no_prefill_worker", "failed", "begun"})


class OwnerMetrics(Collector):
    """Prometheus metrics of one owner. If Dynamo has the same metric, it has the same name here."""

    def __init__(self, owner: Owner, model: str) -> None:
        self._owner = owner
        self._model = model

    def collect(self) -> Iterator[Metric]:
        yield from self._owner_metrics()
        yield from self._request_metrics()
        yield from self._ttft_metrics()
        yield from self._index_metrics()
        yield from self._model_metrics()
        yield from self._worker_metrics()

    def _owner_metrics(self) -> Iterator[Metric]:
        owner = self._owner
        journal, snapshots = owner.journal, owner.snapshots
        yield self._counter("forebay_owner_journal_records", "journal records appended by this owner", journal.written)
        void = "stale and repeated journal records, ignored by every reader"
        yield self._counter("forebay_owner_void_records", void, journal.void)
        foreign = "records on the journal topic that are not journal records of this group, ignored by every reader"
        yield self._counter("forebay_owner_foreign_records", foreign, journal.foreign)
        letters = "input records moved to the topic dead-letters"
        yield self._counter("forebay_owner_dead_letters", letters, owner.dead_letters)
        unsent = "effects dropped because no topic accepts them, for example because of their size"
        yield self._counter("forebay_owner_unsent_records", unsent, owner.unsent)
        ahead = "seconds by which the last recorded clock reading was ahead of this machine's clock at start"
        yield self._gauge("forebay_owner_clock_ahead_seconds", ahead, owner.clock_ahead_us / 1e6)
        yield self._counter("forebay_owner_snapshots", "complete snapshots", snapshots.taken)
        age = "seconds since the state of the newest snapshot was sealed, or since the start of the owner"
        yield self._gauge("forebay_owner_snapshot_age_seconds", age, snapshots.age_s)
        admission = owner.admission
        refused = admission.refused if admission is not None else {}
        faults = 0 if admission is None else admission.sensor_faults
        ingresses = len(owner.world.fleet.ingresses())
        yield self._gauge("forebay_owner_ingresses", "ingresses with a lease", ingresses)
        text = "times that most leases of the group failed at once, which indicates a fault of Redis"
        yield self._counter("forebay_owner_lease_faults", text, faults)
        yield self._counts(
            "forebay_owner_workers_refused",
            "worker leases rejected and workers changed by foreign records, by reason",
            refused,
        )

    def _request_metrics(self) -> Iterator[Metric]:
        world = self._owner.world
        counts = world.counts
        yield self._counter("dynamo_component_router_requests", "requests routed", sum(world.turns.values()))
        yield self._gauge("forebay_owner_requests_in_flight", "requests in flight", len(world.requests))
        yield from self._stage_metrics()
        ignored = {name: count for name, count in counts.items() if not name.startswith(OUTCOMES)}
        yield self._counts("forebay_owner_events", "events without effect, by reason", ignored)
        text = "requests rejected before they were routed, by reason"
        yield self._counts("forebay_router_requests_rejected", text, _with_prefix(counts, "rejected_"))
        text = "requests aborted after they were accepted, by reason"
        yield self._counts("forebay_router_requests_aborted", text, _with_prefix(counts, "aborted_"))
        text = "releases of prefilled KV that no decode worker will fetch, by reason"
        yield self._counts("forebay_router_kv_released", text, _with_prefix(counts, "kv_released_"))
        yield self._gauge("forebay_owner_commands_in_flight", "worker commands in flight", len(world.commands))
        yield self._counts(
            "forebay_owner_commands", "commands by what became of them", _with_prefix(counts, "command_")
        )
        text = "adapters that the owner loaded on workers or unloaded, because requests needed them"
        yield self._counts("forebay_owner_adapters", text, _with_prefix(counts, "adapters_"))
        selections = counts["non_max_overlap_selections"]
        passed_over = "requests routed to a worker other than the one with the largest overlap"
        yield self._counter("dynamo_component_router_non_max_overlap_selections", passed_over, selections)
        # Dynamo exports a histogram; its count and sum have the same names as those of this summary.
        text = "overlap blocks lost by routing a request to a worker other than the one with the largest overlap"
        lost = SummaryMetricFamily("dynamo_component_router_overlap_blocks_lost", text, labels=["model"])
        lost.add_metric([self._model], selections, counts["overlap_blocks_lost"])
        yield lost
        pending = {
            (name, kind.name, str(kind.uncached_tokens_min)): world.queues.length(name, kind)
            for name, pool in sorted(world.pools.items())
            for kind in pool.router.queue.classes
        }
        labels = ("pool", "policy_class", "uncached_tokens_min")
        text = "requests pending in the router's queue"
        yield self._of(gauge, "dynamo_frontend_router_queue_pending_requests", text, pending, labels)

    def _stage_metrics(self) -> Iterator[Metric]:
        owner = self._owner
        phases = Counter(str(request.phase) for request in owner.world.requests.active())
        by_phase = {(phase,): phases[phase] for phase in Phase}
        text = "requests in flight, by phase"
        yield self._of(gauge, "forebay_owner_requests", text, by_phase, ("phase",))
        stages = {(stage,): owner.tally.stages[stage] for stage in get_args(Stage)}
        text = "stages of requests sent to workers by this owner"
        yield self._of(counter, "forebay_router_stages", text, stages, ("stage",))
        # Export zeros from the start, so that rate() sees the first increment.
        known = (
            [("local" if one in LOCAL_REASONS else "remote", one) for one in get_args(PrefillReason)]
            if self._has_decode_pool()
            else []
        )
        places = {place: owner.tally.prefills[place] for place in sorted({*known, *owner.tally.prefills})}
        text = "prefills of requests to decode pools, by placement (local or remote) and reason"
        yield self._of(counter, "forebay_router_prefills", text, places, ("place", "reason"))
        text = "choices of pools for requests by this owner, by pool and reason"
        choices, labels = dict(sorted(owner.tally.pools.items())), ("pool", "role", "reason")
        yield self._of(counter, "forebay_router_pool_choices", text, choices, labels)

    def _ttft_metrics(self) -> Iterator[Metric]:
        if not self._has_decode_pool():
            return
        recorder = self._owner.first_tokens
        text = "seconds from the end of a remote prefill to the first token"
        since = HistogramMetricFamily("forebay_router_prefill_to_first_token_seconds", text, labels=["model"])
        since.add_metric([self._model], _buckets(recorder.since_prefill), recorder.since_prefill.sum_us / 1e6)
        yield since
        text = "seconds of each part of the time to first token of requests with remote prefill"
        labels = ["model", "part"]
        parts = HistogramMetricFamily("forebay_router_time_to_first_token_part_seconds", text, labels=labels)
        for part, times in recorder.parts.items():
            parts.add_metric([self._model, part], _buckets(times), times.sum_us / 1e6)
        yield parts
        text = "bytes of KV that prefill workers kept for requests that have emitted a first token"
        yield self._counter("forebay_router_kv_kept_bytes", text, recorder.kept_bytes)
        text = "bytes of kept KV that decode workers fetched; the remaining bytes were in their caches"
        yield self._counter("forebay_router_kv_fetched_bytes", text, recorder.fetched_bytes)

    def _has_decode_pool(self) -> bool:
        pools = self._owner.world.pools.values()
        return any(pool.role == "decode" and pool.model == self._model for pool in pools)

    def _index_metrics(self) -> Iterator[Metric]:
        index = self._owner.world.index
        text = "KV events that did not apply as they are, by reason"
        yield self._counts("dynamo_component_kv_cache_events_refused", text, index.counts)
        # A counter would get the suffix `_total`, which Dynamo's name does not have.
        applied = UnknownMetricFamily(
            "dynamo_component_kv_cache_events_applied", "KV events applied", labels=["model", "event_type", "status"]
        )
        orphans = index.counts["unknown_parent"]
        for kind in APPLIED.values():
            applied.add_metric([self._model, kind, "ok"], index.applied[kind] - (orphans if kind == "stored" else 0))
        applied.add_metric([self._model, "stored", "parent_block_not_found"], orphans)
        yield applied
        stores = index.stores
        text = "blocks in the prefix index per shared store"
        sizes = {(name,): size for name, size in stores.sizes().items()}
        yield self._of(gauge, "forebay_index_store_blocks", text, sizes, ("store",))
        text = "blocks that workers expected in a shared store and did not find, or could not use"
        yield self._counter("forebay_index_stale_store_blocks", text, stores.stale_blocks)
        text = "events of shared stores that no worker uses (unused), for which a store was dropped (dropped), or for"
        text += " which there was no room (full)"
        yield self._counts("forebay_index_store_events", text, stores.counts)

    def _model_metrics(self) -> Iterator[Metric]:
        """Yield the limits of the model's first worker by name."""
        for worker in self._owner.world.fleet.workers()[:1]:
            spec = worker.spec
            yield self._gauge("dynamo_frontend_model_total_kv_blocks", "KV blocks per worker", spec.kv_blocks_total)
            sequences = "maximum number of running sequences per worker"
            yield self._gauge("dynamo_frontend_model_max_num_seqs", sequences, spec.max_num_seqs)
            tokens = "maximum number of tokens per engine step of a worker"
            yield self._gauge("dynamo_frontend_model_max_num_batched_tokens", tokens, spec.max_num_batched_tokens)
            yield self._gauge("dynamo_frontend_model_kv_cache_block_size", "tokens per KV block", spec.block_size)

    def _worker_metrics(self) -> Iterator[Metric]:
        world = self._owner.world
        roles = {worker.spec.worker_id: worker.spec.role for worker in world.fleet.workers()}
        ranks = {(load.worker_id, str(load.rank)): load for load in world.load.ranks()}
        labels = ("worker_id", "dp_rank", "worker_type")
        blocks = {(*row, roles[load.worker_id]): load.decode_blocks for row, load in ranks.items()}
        text = "KV blocks of active requests per worker rank"
        yield gauge("dynamo_frontend_worker_active_decode_blocks", text, blocks, *labels)
        prefill = {(*row, roles[load.worker_id]): load.prefill_tokens for row, load in ranks.items()}
        text = "prompt tokens still to prefill per worker rank"
        yield gauge("dynamo_frontend_worker_active_prefill_tokens", text, prefill, *labels)
        held = {row: world.index.blocks_held(load.worker_id, load.rank, "device") for row, load in ranks.items()}
        yield gauge("forebay_index_blocks", "device blocks in the prefix index", held, *labels[:2])

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._of(counter, name, text, {(): value})

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._of(gauge, name, text, {(): value})

    def _counts(self, name: str, text: str, counts: Mapping[str, int]) -> Metric:
        rows = {(reason,): count for reason, count in sorted(counts.items())}
        return self._of(counter, name, text, rows, ("reason",))

    def _of(
        self,
        kind: Callable[..., Metric],
        name: str,
        text: str,
        values: Mapping[Any, float],
        labels: Sequence[str] = (),
    ) -> Metric:
        """Return a metric whose first label is the model, with its values by tuples of its other labels."""
        return kind(name, text, {(self._model, *row): value for row, value in values.items()}, "model", *labels)


def _buckets(times: DurationHistogram) -> list[tuple[str, float]]:
    return list(zip([*map(str, BUCKETS_S), "+Inf"], accumulate(times.buckets), strict=True))


def _with_prefix(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in counts.items() if name.startswith(prefix)}
