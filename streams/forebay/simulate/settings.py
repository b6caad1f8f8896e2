"""What is simulated: the size of the workers, the pace of the workload, and the policies to compare."""

from typing import Annotated, get_args

import msgspec

from forebay.core.engine_model import EngineConfig
from forebay.events.control import RouterConfig, RouterMode

WORKERS_MAX = 4_096  # each is a candidate of every decision


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
            vocabulary=(0,),
            block_size=self.block_size,
            kv_blocks_total=self.blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


class PolicyUnusable(ValueError):
    """A policy that does not exist or has no such setting; the text says which."""


def policy(text: str) -> RouterConfig:
    """The routing rule that `NAME` or `NAME:setting=value,setting=value` stands for.

    NAME is a mode of the router or the dotted path of a policy class, the settings are fields of `RouterConfig`.
    Raises PolicyUnusable.
    """
    name, _, rest = text.partition(":")
    modes = get_args(RouterMode)
    if name not in modes and "." not in name:
        raise PolicyUnusable(f"there is no policy {name!r}; there are {', '.join(modes)} and dotted paths of your own")
    fields: dict[str, str] = {}
    for part in rest.split(",") if rest else ():
        setting, equals, value = part.partition("=")
        if not equals or setting not in RouterConfig.__struct_fields__ or setting == "mode":
            raise PolicyUnusable(f"policy {text!r}: {part!r} is no setting=value of the router's configuration")
        fields[setting] = value
    try:
        return msgspec.convert({"mode": name, **fields}, RouterConfig, strict=False)
    except msgspec.ValidationError as error:
        raise PolicyUnusable(f"policy {text!r}: {error}") from error
