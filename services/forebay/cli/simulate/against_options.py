"""Options of `forebay simulate --against`, in their own module, because its code takes a second to import."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.policies.allowed import AllowPolicyOption


@dataclass(frozen=True, slots=True)
class AgainstOptions:
    """Options of `forebay simulate` that compare a simulation with a recording."""

    against: Annotated[
        Path | None,
        typer.Option(help="Simulate this recording with its own fleet and requests, and report the error."),
    ] = None
    speedup: Annotated[
        float,
        typer.Option(min=1e-6, max=1e6, help="With --against: `forebay up --speedup` of the recorded mock engines."),
    ] = 1.0
    repeat: Annotated[
        int,
        typer.Option(min=1, max=1_000, help="With --against: simulate N times, with arrivals shifted by up to 1 ms."),
    ] = 1
    fail_above: Annotated[
        str | None,
        typer.Option(
            help="With --against: exit 1 if an error exceeds its bound: ttft=10,itl=15,e2e=10 (% of p50 and p90), "
            "reuse=1 (percentage points), load=5 (%)."
        ),
    ] = None
    allow_policy: AllowPolicyOption = None
