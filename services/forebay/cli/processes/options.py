"""Options of workers, ingresses and snapshots that `forebay up` shares with `worker`, `ingress` and `router`."""

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from forebay.cli.common.options import Option
from forebay.events.names import unknown_name
from forebay.events.pools import PoolRouting
from forebay.runtime.errors import ConfigError, prefixed
from forebay.simulate.pool_routing_file import read_pool_routing

ModelOption = Annotated[
    str | None,
    Option(
        help="Model directory, or ORG/NAME on the Hugging Face Hub. Real engines need weights. Default: a mock model."
    ),
]
ModelsOption = Annotated[
    list[str] | None,
    Option(
        help="Model directory, or ORG/NAME on the Hugging Face Hub. Real engines need weights. Repeatable: each model"
        " has its own workers. Default: a mock model."
    ),
]
RevisionOption = Annotated[
    str | None, Option(help="Branch, tag or commit of a model on the Hugging Face Hub. Default: its default branch.")
]
ModelNameOption = Annotated[str, Option(help="Model name in the API. Default: ORG/NAME, or the name of the directory.")]
LorasOption = Annotated[
    list[str] | None,
    Option(
        "--lora",
        help="LoRA adapter, served under its own model name. NAME=DIR or NAME=URI with a real engine. Repeatable.",
    ),
]
KvEventsOption = Annotated[bool, Option("--kv-events", help="Publish KV cache events.")]
PoolRoutingOption = Annotated[
    Path | None,
    Option(help="TOML file with the grids that route requests to pools. It replaces the grids at each start."),
]
DrainOption = Annotated[
    float,
    Option(
        min=0.0,
        max=86_400.0,
        help="Seconds to wait for requests in flight after Ctrl-C or SIGTERM. New requests are rejected.",
    ),
]


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    PANEL: ClassVar = "Snapshots"

    snapshot_every: Annotated[int, Option(min=1, help="Take a snapshot after this many journal records.")] = 5_000
    snapshot_age_s: Annotated[
        int, Option(min=1, max=86_400, help="Take a snapshot after this many seconds, if fewer records were written.")
    ] = 300


def pool_routing_by_model(path: Path | None) -> dict[str, PoolRouting]:
    """Return the rules in a file by model; none without a file. Raises ConfigError if the file is invalid."""
    with prefixed("--pool-routing"):
        return {} if path is None else read_pool_routing(path)


def placed_taints(given: Sequence[str], workers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return each worker's taints from values LABEL (for all) or WORKER:LABEL. Raises ConfigError if one is invalid."""
    labels: dict[str, dict[str, None]] = {worker: {} for worker in workers}
    kinds = {worker.rstrip(string.digits): worker for worker in workers}  # the last worker of each kind
    of_one = re.compile(rf"((?:{'|'.join(map(re.escape, kinds))})\d+):(.*)", re.DOTALL)
    for text in given:
        one = of_one.fullmatch(text)
        if one is None:
            for every in labels.values():
                every[text] = None
        elif one[1] not in labels:
            known = [f"{kind}0 to {last}" for kind, last in kinds.items()]
            raise ConfigError(f"--taint {text}: {unknown_name('worker', one[1], known)}")
        elif not one[2]:
            raise ConfigError(f"--taint {text}: the label is empty; expected WORKER:LABEL")
        else:
            labels[one[1]][one[2]] = None
    return {worker: tuple(own) for worker, own in labels.items()}
