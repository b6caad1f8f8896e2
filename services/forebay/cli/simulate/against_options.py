"""The options of `forebay simulate --against`, without what reads recordings: that takes a second to import."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class AgainstOptions:
    """What a simulation is held against, instead of a workload and a fleet."""

    against: Annotated[
        Path | None,
        typer.Option(help="A recording: simulate what it holds, its fleet too, and tell how far off that is."),
    ] = None
    speedup: Annotated[
        float, typer.Option(min=1e-6, max=1e6, help="With --against: how much faster than their model engines were.")
    ] = 1.0
    repeat: Annotated[
        int,
        typer.Option(min=1, max=1_000, help="With --against: simulate so often, arrivals up to 1 ms later each time."),
    ] = 1
    fail_above: Annotated[
        str | None,
        typer.Option(
            help="With --against: exit 1 if it is further off, as ttft=10,itl=15,e2e=10 (% of p50 and of p90), "
            "reuse=1 (points), load=5 (%)."
        ),
    ] = None
