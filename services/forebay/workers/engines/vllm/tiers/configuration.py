"""Arguments with which forebay starts vLLM with KV tiers. This module does not import vLLM."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from forebay.workers.kv_tiers.settings import TierSettings

CONNECTOR = "ForebayTiers"
MODULE = "forebay.workers.engines.vllm.tiers.connector"
HINTS = "forebay_tiers"  # key of `RequestHints` in the `extra_args` of vLLM's sampling parameters


class RequestHints(msgspec.Struct, frozen=True):
    """What forebay adds to a request of vLLM.

    Attributes:
        store_blocks: leading blocks of the prompt that the router expects in the tiers.
        kv_pin_s: seconds for which the tiers keep the blocks of the prompt.
    """

    request_id: str = ""
    store_blocks: int = 0
    kv_pin_s: int = 0


NO_HINTS = RequestHints()


class TierConfig(msgspec.Struct, frozen=True):
    """Configuration of the connector: the `kv_connector_extra_config` of vLLM.

    Attributes:
        weights: digest of the model, from `weights_digest`; empty if the connector must compute it.
        first_rank: number of the worker's first rank. Each rank has a subdirectory of the disk tier.
        errors: file to which the connector writes why it cannot start; None for no file.
    """

    tiers: TierSettings
    weights: str = ""
    first_rank: int = 0
    worker_id: str = ""
    errors: Path | None = None

    def of_rank(self, index: int) -> TierSettings:
        if self.tiers.disk is None:
            return self.tiers
        return replace(self.tiers, disk=self.tiers.disk / f"rank-{self.first_rank + index}")

    def encode(self) -> dict[str, Any]:
        encoded: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        return encoded

    @classmethod
    def decode(cls, extra: Mapping[str, Any]) -> "TierConfig":
        return msgspec.convert(dict(extra), cls, dec_hook=_path)


def connector(config: TierConfig) -> dict[str, Any]:
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": config.encode(),
    }


def children(transfer_config: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return name and extra configuration of each connector in vLLM's `KVTransferConfig`; nothing for None."""
    if transfer_config is None:
        return []
    extra = transfer_config.kv_connector_extra_config
    if transfer_config.kv_connector == "MultiConnector":
        return [(one["kv_connector"], one.get("kv_connector_extra_config", {})) for one in extra.get("connectors", ())]
    return [(transfer_config.kv_connector, extra)]


def unsupported(vllm_config: Any) -> str:
    """Return why KV tiers do not support the configuration of an engine; empty if they do, or if it has none."""
    if all(name != CONNECTOR for name, _ in children(vllm_config.kv_transfer_config)):
        return ""
    parallel = vllm_config.parallel_config
    if parallel.world_size != 1:
        return (
            "KV tiers on a CPU need tensor_parallel_size 1 and pipeline_parallel_size 1, got"
            f" {parallel.tensor_parallel_size} and {parallel.pipeline_parallel_size}: start several workers instead"
        )
    if parallel.distributed_executor_backend != "uni":
        return (
            f"KV tiers need vLLM's executor 'uni', got {parallel.distributed_executor_backend!r}: on a CPU, set"
            " VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )
    if vllm_config.model_config.is_encoder_decoder:
        return "KV tiers do not support encoder-decoder models"
    return ""


def _path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)
