"""Measurements of single points of a profile."""

import asyncio
import random
import statistics
import uuid
from collections.abc import Sequence
from typing import Any

import httpx

from forebay.cli.profiler.profile_file import GridPoint, LeftOut, MeasuredProfile, ProfileSettings
from forebay.cli.trace.stream import StreamedResponse, streaming_body
from forebay.events.scaling import DecodePoint, PrefillPoint

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
