"""What is simulated: the size of the workers, the pace of the workload, and the policies to compare."""

from typing import Annotated, get_args

import msgspec

from forebay.core.engine_model import EngineConfig
from forebay.events.control import BusyThresholds, QueueConfig, RouterConfig, RouterMode

WORKERS_MAX = 4_096  # each is a candidate of every decision
PARTS: dict[str, type[msgspec.Struct]] = {"": RouterConfig, "busy": BusyThresholds, "queue": QueueConfig}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of every worker and the pace of the trace. Defaults are those of Dynamo's mocker.

    Attributes:
        blocks: KV blocks a worker.
        speed: divides the times between arrivals.
        seed: decides between equal candidates, and in policies that draw.
    """

    workers: Annotated[int, msgspec.Meta(ge=1, le=WORKERS_MAX)]
    block_size: int = 64
    blocks: int = 16_384
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    speed: float = 1.0
    seed: int = 0

    def engine(self) -> EngineConfig:
        """Every worker's engine. Raises ValueError for sizes that do not go together."""
        return EngineConfig(
            vocabulary=None,  # whoever only compares times and caches needs nobody to speak
            block_size=self.block_size,
            kv_blocks_total=self.blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


class PolicyUnusable(ValueError):
    """A policy that does not exist, has no such setting or cannot be simulated; the text says which."""


def policy(text: str) -> RouterConfig:
    """The routing rule that `NAME` or `NAME:setting=value,setting=value` stands for.

    NAME is a mode of the router or the dotted path of a policy class, the settings are fields of `RouterConfig`, those
    of its parts as `busy.name` and `queue.name`. Raises PolicyUnusable.
    """
    name, _, rest = text.partition(":")
    if name == "direct":
        raise PolicyUnusable("the policy direct cannot be simulated: the requests of a trace name no workers")
    modes = [mode for mode in get_args(RouterMode) if mode != "direct"]
    if name not in modes and "." not in name:
        raise PolicyUnusable(f"there is no policy {name!r}; there are {', '.join(modes)} and dotted paths of your own")
    parts: dict[str, dict[str, str]] = {part: {} for part in PARTS}
    for one in rest.split(",") if rest else ():
        setting, equals, value = one.partition("=")
        part, _, field = setting.rpartition(".")
        if not equals or part not in PARTS or field not in PARTS[part].__struct_fields__ or setting == "mode":
            raise PolicyUnusable(f"policy {text!r}: {one!r} is no setting=value of the router's configuration")
        parts[part][field] = value
    fields = parts.pop("")
    try:
        return msgspec.convert({"mode": name, **parts, **fields}, RouterConfig, strict=False)
    except msgspec.ValidationError as error:
        raise PolicyUnusable(f"policy {text!r}: {error}") from error
