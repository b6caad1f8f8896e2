"""One run of `forebay profile run`: finds the worker, and measures the points that the file lacks."""

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import msgspec
import uvloop
from rich.table import Table

from forebay.cli.common.credentials import client_headers
from forebay.cli.common.errors import BROKEN, explained, fail
from forebay.cli.common.failures import advice, status_failure
from forebay.cli.common.tables import counting_bar, results, table
from forebay.cli.profiler.command import CONCURRENCY_MAX, NUMBER, TOKENS_MAX, VALUES_MAX, ProfileRunCommand
from forebay.cli.profiler.measure import (
    MeasurementFailed,
    PointImpossible,
    ProfiledWorker,
    impossible_like,
    measure_point,
    random_prompts,
)
from forebay.cli.profiler.profile_file import (
    GridPoint,
    LeftOut,
    MeasuredProfile,
    ProfileSettings,
    grid,
    open_profile,
    write_profile,
)
from forebay.events.names import unknown_name
from forebay.processes.notices import complain
from forebay.runtime.errors import ConfigError

REQUEST_TIMEOUT_S = 10.0  # of a request about the system
TRIAL_TOKENS = 16
INTERRUPTED = 128 + signal.SIGINT
CONTINUE = "run the same command again to continue"
UNLIMITED = httpx.Limits()
NO_TIMEOUT = httpx.Timeout(None)  # each measurement has its own


@dataclass(frozen=True, slots=True)
class ProfiledSystem:
    url: str
    headers: dict[str, str]
    model: str
    worker: str  # id of the worker; empty for the only one


def run_profile(options: ProfileRunCommand) -> None:
    with explained():
        headers = client_headers(options.api_key)
        prompts, contexts = (
            _numbers("--isl", options.isl, TOKENS_MAX),
            _numbers("--context", options.context, TOKENS_MAX),
        )
        concurrencies = _numbers("--concurrency", options.concurrency, CONCURRENCY_MAX)
        if options.role != "prefill" and contexts[0] <= options.output_tokens:
            raise ConfigError(f"--context {contexts[0]} must exceed --output-tokens {options.output_tokens}")
        if not options.out.parent.is_dir():
            raise ConfigError(f"--out {options.out}: no such directory {options.out.parent}")
        system: ProfiledSystem = find_system(options.url.rstrip("/"), headers, options.model, options.worker)
        settings = ProfileSettings(
            model=system.model,
            worker=options.worker,
            role=options.role,
            isl=prompts,
            contexts=contexts,
            concurrencies=concurrencies,
            repeats=options.repeats,
            output_tokens=options.output_tokens,
        )
        show(measure_all(system, open_profile(options.out, settings), options.out, options.timeout_s))


def _numbers(option: str, text: str, most: int) -> tuple[int, ...]:
    """Return the numbers of a list, in ascending order. Raises ConfigError if it is invalid."""
    numbers: set[int] = set()
    for part in text.split(","):
        word = part.strip()
        if not NUMBER.fullmatch(word) or int(word) > most:
            raise ConfigError(f"{option} {text}: {word!r} is not a number from 1 to {most:,}")
        numbers.add(int(word))
    if len(numbers) > VALUES_MAX:
        raise ConfigError(f"{option}: {len(numbers)} numbers; give at most {VALUES_MAX}")
    return tuple(sorted(numbers))


def find_system(url: str, headers: dict[str, str], model: str, worker: str) -> ProfiledSystem:
    with httpx.Client(headers=headers, timeout=REQUEST_TIMEOUT_S) as client:
        cards = _get(client, f"{url}/v1/models")["data"]  # adapters have a `parent`, and aliases a `root`
        models = {str(one["id"]): str(one.get("parent") or one.get("root") or one["id"]) for one in cards}
        if not models:
            raise ConfigError(f"{url} serves no model")
        if model and model not in models:
            raise ConfigError(unknown_name("model", model, models))
        if not model and len(served := sorted(set(models.values()))) > 1:
            raise ConfigError(f"{url} serves several models; name one with --model: {', '.join(served)}")
        chosen = model or next(iter(models))
        status = _get(client, f"{url}/v1/status?{urlencode({'model': models[chosen]})}")
        workers = [str(one["worker_id"]) for one in status["workers"] if one["state"] == "ready"]
    if worker and worker not in workers:
        raise ConfigError(unknown_name("worker", worker, workers))
    if not worker and len(workers) != 1:
        found = "no ready worker" if not workers else f"{len(workers)} ready workers ({', '.join(sorted(workers)[:8])})"
        advised = "start one" if not workers else "name one with --worker"
        raise ConfigError(f"{url} has {found} of the model {chosen}; {advised}")
    return ProfiledSystem(url, headers, chosen, worker)


def measure_all(system: ProfiledSystem, profile: MeasuredProfile, out: Path, timeout_s: float) -> MeasuredProfile:
    """Measure the points that `profile` lacks, and write the file after each of them. Return the complete profile.

    A point is left out after `timeout_s`. Raises ConfigError if the system rejects the first request, or the file
    cannot be written. Exits if the system stops serving requests, or the user interrupts the run.
    """
    points = list(grid(profile.settings))
    todo = [point for point in points if not profile.has(point)]
    if len(todo) < len(points):
        complain(f"{out}: {len(points) - len(todo)} of {len(points)} points were measured before")
    with counting_bar() as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        task = progress.add_task("", total=len(points), completed=len(points) - len(todo))

        async def measured() -> MeasuredProfile:
            found = profile
            async with httpx.AsyncClient(headers=system.headers, timeout=NO_TIMEOUT, limits=UNLIMITED) as client:
                worker = ProfiledWorker(client, system.url, system.model, system.worker, timeout_s)
                if todo:
                    await _try(worker)
                for point in todo:
                    progress.update(task, description=str(point))
                    found = _joined(found, await _measured(worker, point, found))
                    write_profile(out, found)
                    progress.advance(task)
            return found

        try:
            return runner.run(measured())
        except KeyboardInterrupt:
            fail(f"interrupted; {CONTINUE}", INTERRUPTED)


async def _try(worker: ProfiledWorker) -> None:
    """Send a short request. Raises ConfigError if the system rejects it, as it would reject every other one."""
    (prompt,) = random_prompts(TRIAL_TOKENS, 1, "trial")
    try:
        await worker.measure(prompt, 1)
    except (PointImpossible, MeasurementFailed) as error:
        raise ConfigError(str(error)) from None


async def _measured(worker: ProfiledWorker, point: GridPoint, before: MeasuredProfile) -> MeasuredProfile:
    """Return a profile with nothing but this point, measured or left out."""
    left_out = impossible_like(point, before.left_out)
    if left_out is None:
        try:
            return await measure_point(worker, point, before.settings)
        except PointImpossible as error:
            left_out = LeftOut(point=point, reason=str(error))
            complain(f"left out: {point}: {error}")
        except MeasurementFailed as error:
            fail(f"{point}: {error}; {CONTINUE}", BROKEN)
    return MeasuredProfile(settings=before.settings, left_out=(left_out,))


def _joined(first: MeasuredProfile, second: MeasuredProfile) -> MeasuredProfile:
    return MeasuredProfile(
        settings=first.settings,
        prefill=first.prefill + second.prefill,
        decode=first.decode + second.decode,
        left_out=first.left_out + second.left_out,
    )


def _get(client: httpx.Client, url: str) -> Any:
    """Return the JSON response to a GET request. Raises ConfigError if there is none."""
    try:
        response = client.get(url)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConfigError(f"no response from {url} ({error!r}); {advice(error)}") from error
    if response.status_code != httpx.codes.OK:
        failure = status_failure(response.status_code, response.content)
        raise ConfigError(f"{url}: {failure.kind}: {failure.text}")
    try:
        return msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        raise ConfigError(f"{url}: the response is not JSON; check --url") from None


def show(profile: MeasuredProfile) -> None:
    """Print the measured points as tables, and the points that were left out."""
    console = results()
    if profile.prefill:
        console.print(_table("prefill", ("isl", "ttft_ms", "tokens_per_s"), profile))
    if profile.decode:
        console.print(_table("decode", ("context", "concurrency", "itl_ms", "tokens_per_s"), profile))
    for one in profile.left_out:
        console.print(f"left out: {one.point}: {one.reason}", markup=False)


def _table(stage: str, columns: tuple[str, ...], profile: MeasuredProfile) -> Table:
    shown = table(stage, columns, left=0)
    for point in getattr(profile, stage):
        values = (getattr(point, column) for column in columns)
        shown.add_row(*(f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" for value in values))
    return shown
