"""`forebay profile run`: measure a live worker for the planner and the simulator."""

import re
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.api_key import ClientKeyOption, client_headers
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.extras import require_extra
from forebay.cli.common.page import require_writable
from forebay.cli.profiler.profile_file import ProfiledRole, ProfileSettings, open_profile
from forebay.ingress.errors import Unusable

URL = "http://127.0.0.1:8000"
TITLE = "forebay profile"  # of the report
ISL = "128,512,2048,8192"
CONTEXTS = "512,2048,8192"
CONCURRENCIES = "1,4,16,64"
TOKENS_MAX = 1 << 22
CONCURRENCY_MAX = 4_096
VALUES_MAX = 64
NUMBER = re.compile(r"[1-9][0-9]{0,6}")


def run(
    out: Annotated[Path, typer.Option("--out", "-o", dir_okay=False, help="JSON file for the measured points.")],
    url: Annotated[str, typer.Option(help="URL of the running system.")] = URL,
    api_key: ClientKeyOption = None,
    model_name: Annotated[str, typer.Option(help="Model name in the API.", show_default="first of the system")] = "",
    worker: Annotated[
        str, typer.Option(help="Id of the worker, if there are several; requires an ingress with --routing-hints.")
    ] = "",
    role: Annotated[ProfiledRole, typer.Option(help="Stages of requests that the worker computes.")] = "aggregated",
    isl: Annotated[str, typer.Option(metavar="N,N,...", help="Prompt lengths in tokens.")] = ISL,
    context: Annotated[str, typer.Option(metavar="N,N,...", help="Context lengths of decode in tokens.")] = CONTEXTS,
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="Numbers of concurrent requests of decode.")
    ] = CONCURRENCIES,
    output_tokens: Annotated[
        int, typer.Option(min=8, max=4_096, help="Output tokens per request to measure decode.")
    ] = 64,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Measurements per point; the median counts.")] = 3,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="Seconds after which a point is left out.")
    ] = 300.0,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, max=TOKENS_MAX, help="Tokens per step of the engine, for --engine-profile-out.")
    ] = 8_192,
    engine_profile_out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write an engine profile for the simulator.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write a self-contained HTML report to this path.")
    ] = None,
) -> None:
    """Measure TTFT, inter-token latency and throughput of a live worker.

    The worker must serve no other requests meanwhile. The file is written after each point: the same command continues
    an interrupted run. Exits 1 if the system stops serving requests.
    """
    with explained():
        headers = client_headers(api_key)
        prompts, contexts = _numbers("--isl", isl, TOKENS_MAX), _numbers("--context", context, TOKENS_MAX)
        concurrencies = _numbers("--concurrency", concurrency, CONCURRENCY_MAX)
        if role != "prefill" and contexts[0] <= output_tokens:
            raise Unusable(f"--context {contexts[0]} must exceed --output-tokens {output_tokens}")
        if not out.parent.is_dir():
            raise Unusable(f"--out {out}: no such directory {out.parent}")
    _require_outputs(role, engine_profile_out, report)
    # Imported here, because --help should not wait for the HTTP client.
    from forebay.cli.profiler.outputs import show, write_engine_profile, write_report  # noqa: PLC0415
    from forebay.cli.profiler.run import ProfiledSystem, find_system, measure_all  # noqa: PLC0415

    with explained():
        system: ProfiledSystem = find_system(url.rstrip("/"), headers, model_name, worker)
        settings = ProfileSettings(
            model=system.model,
            worker=worker,
            role=role,
            isl=prompts,
            contexts=contexts,
            concurrencies=concurrencies,
            repeats=repeats,
            output_tokens=output_tokens,
        )
        profile = measure_all(system, open_profile(out, settings), out, timeout_s)
        show(profile)
        if engine_profile_out is not None:
            write_engine_profile(profile, max_num_batched_tokens, engine_profile_out)
    if report is not None:
        write_report(profile, report)


def _require_outputs(role: ProfiledRole, engine_profile_out: Path | None, report: Path | None) -> None:
    """Check, before anything is measured, that the engine profile and the report can be written."""
    if engine_profile_out is not None:
        require_extra("fit", "--engine-profile-out", "numpy", "scipy")
        if role != "aggregated":
            fail(f"--engine-profile-out requires --role aggregated, got {role}; it needs prefill and decode")
    if report is not None:
        require_writable("--report", report, TITLE)


def _numbers(option: str, text: str, most: int) -> tuple[int, ...]:
    """Return the numbers of a list, in ascending order. Raises Unusable if it is invalid."""
    numbers: set[int] = set()
    for part in text.split(","):
        word = part.strip()
        if not NUMBER.fullmatch(word) or int(word) > most:
            raise Unusable(f"{option} {text}: {word!r} is not a number from 1 to {most:,}")
        numbers.add(int(word))
    if len(numbers) > VALUES_MAX:
        raise Unusable(f"{option}: {len(numbers)} numbers; give at most {VALUES_MAX}")
    return tuple(sorted(numbers))
