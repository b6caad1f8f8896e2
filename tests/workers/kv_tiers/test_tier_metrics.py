"""Metrics of KV tiers."""

from collections import Counter

from prometheus_client import CollectorRegistry, generate_latest

from forebay.workers.kv_tiers.metrics import TierCounters, TierMetrics


def exported(*ranks: TierCounters) -> list[str]:
    registry = CollectorRegistry()
    registry.register(TierMetrics("w", {rank: lambda one=one: one for rank, one in enumerate(ranks)}))  # type: ignore[misc]
    return generate_latest(registry).decode().splitlines()


def test_metrics_have_the_names_of_kvbm() -> None:
    one = TierCounters(
        matched_tokens=640,
        offloaded_blocks=Counter({("device", "host"): 1, ("host", "disk"): 2, ("disk", "store"): 3}),
        onboarded_blocks=Counter(store=4),
        onboarded_bytes=Counter(store=4096),
        misses=Counter({("store", "missing"): 5, ("store", "corrupt"): 1, ("disk", "corrupt"): 7}),
        write_failures=Counter({("store", "full"): 8}),
        load_us=Counter(disk=1_500_000),
        skipped=Counter(filter=9),
        resident_blocks={"host": 10},
        pinned_blocks={"host": 3},
        hit_rates={"store": 0.25},
    )
    lines = exported(one, TierCounters())
    for line in (
        'kvbm_matched_tokens{rank="0",worker_id="w"} 640.0',
        'kvbm_matched_tokens{rank="1",worker_id="w"} 0.0',
        'kvbm_offload_blocks_d2h{rank="0",worker_id="w"} 1.0',
        'kvbm_offload_blocks_h2d{rank="0",worker_id="w"} 2.0',
        'kvbm_offload_blocks_d2d{rank="0",worker_id="w"} 0.0',
        'kvbm_offload_blocks_d2o{rank="0",worker_id="w"} 0.0',
        'kvbm_offload_blocks_h2o{rank="0",worker_id="w"} 0.0',
        'kvbm_onboard_blocks_h2d{rank="0",worker_id="w"} 0.0',
        'kvbm_onboard_blocks_d2d{rank="0",worker_id="w"} 0.0',
        'kvbm_onboard_blocks_o2d{rank="0",worker_id="w"} 4.0',
        'kvbm_offload_bytes_object{rank="0",worker_id="w"} 0.0',
        'kvbm_onboard_bytes_object{rank="0",worker_id="w"} 4096.0',
        'kvbm_object_read_failures{rank="0",worker_id="w"} 6.0',
        'kvbm_object_write_failures{rank="0",worker_id="w"} 8.0',
        'kvbm_host_cache_hit_rate{rank="0",worker_id="w"} 0.0',
        'kvbm_disk_cache_hit_rate{rank="0",worker_id="w"} 0.0',
        'kvbm_object_cache_hit_rate{rank="0",worker_id="w"} 0.25',
        'forebay_tier_offloaded_blocks_total{rank="0",source="disk",tier="store",worker_id="w"} 3.0',
        'forebay_tier_misses_total{rank="0",reason="corrupt",tier="disk",worker_id="w"} 7.0',
        'forebay_tier_load_seconds_total{rank="0",tier="disk",worker_id="w"} 1.5',
        'forebay_tier_skipped_blocks_total{rank="0",reason="filter",worker_id="w"} 9.0',
        'forebay_tier_resident_blocks{rank="0",tier="host",worker_id="w"} 10.0',
        'forebay_tier_pinned_blocks{rank="0",tier="host",worker_id="w"} 3.0',
    ):
        assert line in lines
    assert {line.split("{")[0] for line in lines if line.startswith("kvbm_")} == {
        line.split()[2] for line in lines if line.startswith("# TYPE kvbm_")
    }
