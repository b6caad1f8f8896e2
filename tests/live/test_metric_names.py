"""A scrape of the router contains Dynamo's metric names, so that a dashboard made for Dynamo works.

Source: Dynamo's metrics catalog. docs/divergence.md lists the metrics that forebay does not export.
"""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from forebay.ingress.metrics import IngressMetrics
from forebay.live.owner.metrics import OwnerMetrics
from forebay.transport.sqlite.log import SqliteLog
from tests.system import MODEL, System, submitted, until

pytestmark = pytest.mark.asyncio

ROUTER = {
    "dynamo_component_router_requests_total": {"model"},
    "dynamo_component_router_non_max_overlap_selections_total": {"model"},
    "dynamo_component_router_overlap_blocks_lost_sum": {"model"},
    "dynamo_component_router_overlap_blocks_lost_count": {"model"},
    "dynamo_component_kv_cache_events_applied": {"event_type", "status"},
    "dynamo_frontend_router_queue_pending_requests": {"model"},
    "dynamo_frontend_worker_active_decode_blocks": {"worker_id", "dp_rank"},
    "dynamo_frontend_worker_active_prefill_tokens": {"worker_id", "dp_rank"},
    "dynamo_frontend_model_total_kv_blocks": {"model"},
    "dynamo_frontend_model_max_num_seqs": {"model"},
    "dynamo_frontend_model_max_num_batched_tokens": {"model"},
    "dynamo_frontend_model_kv_cache_block_size": {"model"},
}
FRONTEND = {
    "dynamo_frontend_requests_total": {"model", "endpoint", "request_type", "status"},
    "dynamo_frontend_model_rejection_total": {"model", "endpoint"},
    "dynamo_frontend_inflight_requests": {"model"},
    "dynamo_frontend_disconnected_clients": {"model"},
    "dynamo_frontend_time_to_first_token_seconds_bucket": {"model", "le"},
    "dynamo_frontend_inter_token_latency_seconds_bucket": {"model", "le"},
    "dynamo_frontend_request_duration_seconds_bucket": {"model", "le"},
    "dynamo_frontend_input_sequence_tokens_bucket": {"model", "le"},
    "dynamo_frontend_output_sequence_tokens_bucket": {"model", "le"},
    "dynamo_frontend_cached_tokens_bucket": {"model", "le"},
}


async def test_dynamo_metric_names_and_labels_are_exported(log: SqliteLog) -> None:
    registry = CollectorRegistry()
    frontend = IngressMetrics(registry, MODEL)
    frontend.ended("completions", stream=True, status="success")
    frontend.rejected("completions")
    async with System(log).started(workers=1) as system, system.owned() as owner:
        registry.register(OwnerMetrics(owner, MODEL))
        await until(lambda: len(owner.world.fleet) == 1)
        system.send(submitted("r", list(range(9))))
        await until(lambda: system.ends() and not len(owner.world.requests))
        text = generate_latest(registry).decode()
    shown: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            shown.setdefault(sample.name, set()).update(sample.labels)
    wanted = ROUTER | FRONTEND
    assert {name: labels for name, labels in wanted.items() if not labels <= shown.get(name, set())} == {}
