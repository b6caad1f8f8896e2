"""`forebay profile run`: measure a live worker for the planner."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from forebay.cli.common.credentials import ClientKeyOption
from forebay.cli.common.options import Option
from forebay.cli.profiler.profile_file import ProfiledRole

URL = "http://127.0.0.1:8000"
ISL = "128,512,2048,8192"
CONTEXTS = "512,2048,8192"
CONCURRENCIES = "1,4,16,64"
TOKENS_MAX = 1 << 22
CONCURRENCY_MAX = 4_096
VALUES_MAX = 64
NUMBER = re.compile(r"[1-9][0-9]{0,6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRunCommand:
    """Measure TTFT, inter-token latency and throughput of a live worker.

    The worker must serve no other requests meanwhile. The file is written after each point: the same command continues
    an interrupted run. Exits 1 if the system stops serving requests.
    """

    RUN: ClassVar = "profiler.run:run_profile"

    out: Annotated[Path, Option("--out", short="-o", help="JSON file for the measured points.")]
    url: Annotated[str, Option(help="URL of the running system.")] = URL
    api_key: ClientKeyOption = None
    model: Annotated[str, Option(metavar="NAME", help="Model name in the API, if there are several.")] = ""
    worker: Annotated[
        str, Option(help="Id of the worker, if there are several; requires an ingress with --routing-hints.")
    ] = ""
    role: Annotated[ProfiledRole, Option(help="Stages of requests that the worker computes.")] = "aggregated"
    isl: Annotated[str, Option(metavar="N,N,...", help="Prompt lengths in tokens.")] = ISL
    context: Annotated[str, Option(metavar="N,N,...", help="Context lengths of decode in tokens.")] = CONTEXTS
    concurrency: Annotated[str, Option(metavar="N,N,...", help="Numbers of concurrent requests of decode.")] = (
        CONCURRENCIES
    )
    output_tokens: Annotated[int, Option(min=8, max=4_096, help="Output tokens per request to measure decode.")] = 64
    repeats: Annotated[int, Option(min=1, max=100, help="Measurements per point; the median counts.")] = 3
    timeout_s: Annotated[float, Option(min=0.1, max=86_400, help="Seconds after which a point is left out.")] = 300.0
