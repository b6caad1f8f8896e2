"""Arguments with which forebay starts vLLM with KV tiers. This module does not import vLLM."""

from collections.abc import Mapping
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
        request_id: id of the request on the log.
        store_blocks: leading blocks of the prompt that the router expects in the tiers.
    """

    request_id: str = ""
    store_blocks: int = 0


NO_HINTS = RequestHints()


class TierConfig(msgspec.Struct, frozen=True):
    """Configuration of the connector: the `kv_connector_extra_config` of vLLM.

    Attributes:
        tiers: tiers of each rank.
        weights: digest of the model, from `model_digest`; empty if the connector must compute it.
    """

    tiers: TierSettings
    weights: str = ""

    def encode(self) -> dict[str, Any]:
        """Return the configuration as a dictionary of JSON values."""
        encoded: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        return encoded

    @classmethod
    def decode(cls, extra: Mapping[str, Any]) -> "TierConfig":
        """Return the configuration in a dictionary from `encode`. Raises ValueError if it is invalid."""
        return msgspec.convert(dict(extra), cls, dec_hook=_path)


def transfer_config(config: TierConfig) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` for the connector of the tiers."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": config.encode(),
    }


def _path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)
