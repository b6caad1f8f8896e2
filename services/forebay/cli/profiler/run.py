"""One run of `forebay profile run`: finds the worker, and measures the points that the file lacks."""

import asyncio
import random
import signal
import statistics
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import msgspec
import uvloop
from rich.table import Table

from forebay.cli.command import (
    NUMBER,
    PROFILED_CONCURRENCY_MAX,
    PROFILED_TOKENS_MAX,
    PROFILED_VALUES_MAX,
    ProfileRunCommand,
)
from forebay.cli.common.credentials import client_headers
from forebay.cli.common.errors import BROKEN, explained, fail
from forebay.cli.common.failures import advice, status_failure
from forebay.cli.common.tables import counting_bar, results, table
from forebay.cli.profiler.profile_file import (
    GridPoint,
    LeftOut,
    MeasuredProfile,
    ProfileSettings,
    grid,
    open_profile,
    write_profile,
)
from forebay.cli.trace.stream import StreamedResponse, streaming_body
from forebay.events.names import unknown_name
from forebay.events.scaling import DecodePoint, PrefillPoint
from forebay.processes.notices import complain
from forebay.runtime.errors import ConfigError

TOKEN_IDS = range(16, 240)  # in the vocabulary of every model, and above the special tokens of most
# Client errors that other requests would get, too.
NOT_ABOUT_REQUEST = frozenset({httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.TOO_MANY_REQUESTS})


class PointImpossible(Exception):
    """This point cannot be measured, but others can. The message is the reason."""


class MeasurementFailed(Exception):
    """The system does not serve requests. The message is the reason."""


class ProfiledWorker:
    """The worker that is measured, behind an OpenAI-compatible API."""

    def __init__(self, client: httpx.AsyncClient, url: str, model: str, worker: str, timeout_s: float) -> None:
        """`worker` is empty for a system with one worker; `timeout_s` limits each response."""
        self._client = client
        self._url = url
        # Prompts of the same point are the same in each run. The salt keeps them apart in the worker's cache.
        self._fields: dict[str, Any] = {"model": model, "cache_salt": uuid.uuid4().hex}
        if worker:
            self._fields["nvext"] = {"backend_instance_id": worker}
        self._timeout_s = timeout_s

    async def measure(self, prompt: list[int], output_tokens: int) -> StreamedResponse:
        """Send a prompt and measure the response.

        Raises PointImpossible if the system rejects the request, or does not respond in time, and MeasurementFailed if
        it does not serve requests.
        """
        body = streaming_body(output_tokens, {**self._fields, "prompt": prompt})
        response = StreamedResponse(output_tokens)
        try:
            async with asyncio.timeout(self._timeout_s):
                failure = await response.follow(self._client, self._url, body, {})
        except TimeoutError:
            raise PointImpossible(f"no complete response within {self._timeout_s:g} s") from None
        if failure is None:
            return response
        if httpx.codes.is_client_error(response.status) and response.status not in NOT_ABOUT_REQUEST:
            raise PointImpossible(f"{failure.kind}: {failure.text}")  # for example, the prompt exceeds the context
        raise MeasurementFailed(f"{failure.kind}: {failure.text}")


def random_prompts(tokens: int, count: int, seed: str) -> list[list[int]]:
    """Return prompts of random token ids, the same for the same seed. No two of them share a prefix of a KV block."""
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    return [rng.choices(TOKEN_IDS, k=tokens) for _ in range(count)]


BUSY_PROMPTS = 4  # concurrent prompts that keep a worker busy with prefill
CACHED_MAX = 0.05  # share of prompt tokens; more would make a prefill look too fast
CACHED_MIN = 0.5  # share of prompt tokens; less means that decode was measured together with prefill
PROMPT_CHECKED_MIN = 256  # tokens; shorter prompts consist of few KV blocks, of which the last one is not cached
OUTPUT_TOKENS_MAX = 4_096  # per request, to measure many requests at once
MS = 1_000.0


class _NotConcurrent(PointImpossible):
    """Some responses ended before others began."""


async def measure_point(worker: ProfiledWorker, point: GridPoint, settings: ProfileSettings) -> MeasuredProfile:
    """Measure a point repeatedly, and return a profile of the medians. Raises PointImpossible or MeasurementFailed."""
    if point.stage == "prefill":
        return MeasuredProfile(settings=settings, prefill=(await _prefill(worker, point, settings.repeats),))
    return MeasuredProfile(settings=settings, decode=(await _decode(worker, point, settings),))


def impossible_like(point: GridPoint, left_out: Sequence[LeftOut]) -> LeftOut | None:
    """Return why a point is not worth a try: a smaller one was not possible. None if it is."""
    for one in left_out:
        smaller = one.point
        if smaller.stage == point.stage == "prefill" and smaller.tokens < point.tokens:
            return LeftOut(point=point, reason=one.reason)
        if smaller.stage == point.stage and smaller.tokens == point.tokens and smaller.concurrency < point.concurrency:
            return LeftOut(point=point, reason=one.reason)
    return None


async def _prefill(worker: ProfiledWorker, point: GridPoint, repeats: int) -> PrefillPoint:
    """Measure prompts alone for the time to first token, and several at once for the throughput."""
    ttft_ms: list[float] = []
    tokens_per_s: list[float] = []
    for number in range(repeats):
        first, *others = random_prompts(point.tokens, 1 + BUSY_PROMPTS, f"{point}, {number}")
        alone = await worker.measure(first, 1)
        busy = await _together(worker, others, 1)
        _require_uncached([alone, *busy])
        ttft_ms.append(alone.ttft_ms)
        tokens_per_s.append(MS * _prompt_tokens(busy) / max(one.ttft_ms for one in busy))
    return PrefillPoint(
        isl=point.tokens, ttft_ms=statistics.median(ttft_ms), tokens_per_s=statistics.median(tokens_per_s)
    )


async def _decode(worker: ProfiledWorker, point: GridPoint, settings: ProfileSettings) -> DecodePoint:
    """Measure concurrent responses. If some end before others begin, they are measured again with longer responses."""
    output_tokens = settings.output_tokens
    while True:
        try:
            rounds = [await _decode_once(worker, point, output_tokens, number) for number in range(settings.repeats)]
            break
        except _NotConcurrent:
            output_tokens *= 2
            if output_tokens > OUTPUT_TOKENS_MAX or output_tokens >= point.tokens:
                raise
    itl_s = statistics.median(rounds)
    return DecodePoint(
        context=point.tokens, concurrency=point.concurrency, itl_ms=itl_s * MS, tokens_per_s=point.concurrency / itl_s
    )


async def _decode_once(worker: ProfiledWorker, point: GridPoint, output_tokens: int, number: int) -> float:
    """Return the mean inter-token latency in seconds. The prompts are cached before, so that decode runs alone."""
    length = point.tokens - output_tokens // 2  # the mean context of the response is that of the point
    prompts = random_prompts(length, point.concurrency, f"{point}, {output_tokens}, {number}")
    await _together(worker, prompts, 1)
    measured = await _together(worker, prompts, output_tokens)
    _require_cached(measured)
    _require_concurrent(measured)
    return statistics.fmean(one.itl_s for one in measured)


async def _together(worker: ProfiledWorker, prompts: Sequence[list[int]], output_tokens: int) -> list[StreamedResponse]:
    """Send prompts at the same time. Raises the first error, after the other requests were cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(worker.measure(prompt, output_tokens)) for prompt in prompts]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _require_uncached(measured: Sequence[StreamedResponse]) -> None:
    cached, total = _cached(measured)
    if cached > CACHED_MAX * total:
        raise PointImpossible(f"{cached} of {total} prompt tokens were already cached, although the prompts are new")


def _require_cached(measured: Sequence[StreamedResponse]) -> None:
    cached, total = _cached(measured)
    if total >= PROMPT_CHECKED_MIN * len(measured) and cached < CACHED_MIN * total:
        text = f"only {cached} of {total} prompt tokens were cached"
        raise PointImpossible(f"{text}: the KV cache has no room for the requests, or prefix caching is off")


def _require_concurrent(measured: Sequence[StreamedResponse]) -> None:
    last_start_s = max(one.first_s for one in measured)
    running = sum(one.last_s >= last_start_s for one in measured)
    if running < len(measured):
        text = f"{len(measured) - running} of {len(measured)} responses ended before the last one began"
        raise _NotConcurrent(f"{text}: the worker does not run so many requests at once")


def _cached(measured: Sequence[StreamedResponse]) -> tuple[int, int]:
    return sum(one.cached_tokens for one in measured), _prompt_tokens(measured)


def _prompt_tokens(measured: Sequence[StreamedResponse]) -> int:
    return sum(one.usage["prompt_tokens"] for one in measured)


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
            _numbers("--isl", options.isl, PROFILED_TOKENS_MAX),
            _numbers("--context", options.context, PROFILED_TOKENS_MAX),
        )
        concurrencies = _numbers("--concurrency", options.concurrency, PROFILED_CONCURRENCY_MAX)
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
    if len(numbers) > PROFILED_VALUES_MAX:
        raise ConfigError(f"{option}: {len(numbers)} numbers; give at most {PROFILED_VALUES_MAX}")
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
