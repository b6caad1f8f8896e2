"""vLLM's own offloading as the KV tiers of a worker. This module does not import vLLM."""

from hashlib import sha256
from typing import Any

from forebay.workers.kv_tiers.object_store import parsed_bucket
from forebay.workers.kv_tiers.settings import TierSettings, require_no_fault


def offloads_itself(device: str) -> bool:
    """Return whether vLLM itself keeps KV in the tiers on this type of device; otherwise forebay's connector does.

    vLLM's connector supports tensor and pipeline parallelism, but no CPU.
    """
    return device != "cpu"


def offloading_connector(tiers: TierSettings) -> dict[str, Any]:
    """Return the configuration of vLLM's connector. Raises EngineError if it does not support these tiers."""
    in_bucket = tiers.store.startswith("s3://")
    require_no_fault({
        "host:size is missing: vLLM's offloading copies KV to host memory first": not tiers.host_bytes,
        "disk:size: vLLM's offloading does not limit the size of a directory; remove the size": tiers.disk_bytes,
        "store:size: vLLM's offloading does not limit the size of a store; remove the size": tiers.store_bytes,
        "filter=on: vLLM's offloading to a disk or store has no filter; remove the key": tiers.filter,
        "store:endpoint is missing: vLLM's offloading to a bucket needs the URL of its server":
            in_bucket and not tiers.store_endpoint,
    })  # fmt: skip
    lower: list[dict[str, Any]] = []
    if tiers.disk is not None:
        lower.append({"type": "fs", "root_dir": str(tiers.disk), "locality": "LOCAL"})
    if in_bucket:
        name, prefix = parsed_bucket(tiers.store)
        scheme, _, host = tiers.store_endpoint.partition("://")
        bucket = {"bucket": name, "endpoint_override": host, "scheme": scheme}
        lower.append({"type": "obj", "store_config": bucket, "prefix": prefix.rstrip("/"), "locality": "REMOTE"})
    elif tiers.store:
        lower.append({"type": "fs", "root_dir": tiers.store, "locality": "REMOTE"})
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": tiers.host_bytes,
            "self_describing_kv_events": True,  # otherwise events have no tokens
            "secondary_tiers": [one | {"enable_kv_events": True} for one in lower],
        },
    }


def store_name(store: str, vllm_config: Any) -> str:
    """Return the router's name of a store. Engines with the same name read each other's blocks.

    Like vLLM's names of directories, it depends on model, block size, dtype and parallelism.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    parts = [store, model.model, cache.block_size, str(model.dtype), cache.cache_dtype]
    parts += [parallel.tensor_parallel_size, parallel.pipeline_parallel_size]
    return f"vllm-{sha256(repr(parts).encode()).hexdigest()[:16]}"
