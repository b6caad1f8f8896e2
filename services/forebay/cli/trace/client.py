"""HTTP client of `forebay trace`: sends the requests of a workload when they are due, and measures the responses."""

import asyncio
import random
import signal
import statistics
import time
import uuid
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from forebay.cli.common.credentials import API_KEY_VARIABLE
from forebay.cli.common.failures import Failure, FailureCounts, advice, status_failure
from forebay.cli.trace.stream import StreamedResponse, streaming_body
from forebay.simulate.outcome import percentiles
from forebay.simulate.workload import Turn, Workload

TIMEOUT_S = 900.0
METRICS_TIMEOUT_S = 5.0
RETRY_S = 60.0  # seconds to retry a request while its group has no owner; a failover takes seconds
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAMPLE_S = 0.25
BUSY_CPU = 0.9  # share of one CPU; the client has one thread
BUSY_LAG_S = 0.1  # delay of the event loop
BUSY_S_MIN = 0.5  # shorter stalls are not worth a warning
SATURATED_SHARE = 0.1  # of the duration
QUARTER = 4
QUEUE_REQUESTS_MIN = 20  # fewer requests have no reliable trend
QUEUE_GROWTH_MS = 500.0
LATE_MS = 100.0
TOKEN_IDS = 1_000  # prompts use the lowest token ids, which every vocabulary has
CACHED_TOKENS = 1 << 21


@dataclass(slots=True)
class Pace:
    """When the requests of a trace were due and sent, and how busy the client was."""

    # Due time of each sent request with a fixed time, in seconds from the start.
    due_s: "array[float]" = field(default_factory=lambda: array("d"))
    # Time at which each of these requests was sent, in seconds from the start.
    sent_s: "array[float]" = field(default_factory=lambda: array("d"))
    # Delay of each sent request after its due time, dependent requests included.
    late_ms: "array[float]" = field(default_factory=lambda: array("d"))
    # Time to first token of each completed request, by the order of sending; None if it failed.
    first_token_ms: list[float | None] = field(default_factory=list)
    delayed: int = 0  # number of requests that waited because too many requests were in flight
    lasted_s: float = 0.0  # seconds until the last response, or until the trace was interrupted
    busy_s: float = 0.0  # seconds in which the client was saturated
    lag_max_s: float = 0.0  # longest delay of the client's event loop
    # CPUs used by each server process on average, by URL; only of servers that export it.
    server_cpus: dict[str, float] = field(default_factory=dict)

    async def watch_client(self) -> None:
        """Sample CPU time and event loop delay of this process until cancelled."""
        began_s, cpu_s = time.monotonic(), time.process_time()
        while True:
            await asyncio.sleep(SAMPLE_S)
            now_s, now_cpu_s = time.monotonic(), time.process_time()
            self.add_sample(now_s - began_s, now_cpu_s - cpu_s)
            began_s, cpu_s = now_s, now_cpu_s

    def add_sample(self, elapsed_s: float, cpu_s: float) -> None:
        """Add a sample of the client that should have taken `SAMPLE_S`, and took `elapsed_s` and `cpu_s` of CPU."""
        lag_s = elapsed_s - SAMPLE_S
        self.lag_max_s = max(self.lag_max_s, lag_s)
        if lag_s >= BUSY_LAG_S or cpu_s >= BUSY_CPU * elapsed_s:
            self.busy_s += elapsed_s

    def summary(self) -> dict[str, Any]:
        """Return the pace as `--json` prints it. The rates are those of the requests with a fixed time."""
        late = {**percentiles(self.late_ms), "max": max(self.late_ms)} if self.late_ms else {}
        return {
            "requested_s": max(self.due_s, default=0.0),
            "achieved_s": max(self.sent_s, default=0.0),
            "requested_per_s": _rate(self.due_s),
            "achieved_per_s": _rate(self.sent_s),
            "lasted_s": self.lasted_s,
            "late_ms": late,
            "client_busy_s": self.busy_s,
            "client_lag_max_s": self.lag_max_s,
            "server_cpus": self.server_cpus,
        }

    def warnings(self, concurrency_max: int) -> Iterator[str]:
        """Yield a text for each sign that the client or the server was saturated."""
        late_ms = max(self.late_ms, default=0.0)
        sent_late = f"; requests were sent up to {late_ms:.0f} ms late" if late_ms >= LATE_MS else ""
        if self.busy_s >= max(BUSY_S_MIN, SATURATED_SHARE * self.lasted_s):
            yield (
                f"the client was saturated for {self.busy_s:.1f} of {self.lasted_s:.1f} s (event loop delayed by up to "
                f"{self.lag_max_s * 1e3:.0f} ms), so latencies include delays of the client{sent_late}; lower --speed, "
                "or split the workload over several machines"
            )
        elif sent_late and not self.delayed:
            yield f"the client fell behind the workload{sent_late}"
        if self.delayed:
            yield (
                f"the server was saturated: {self.delayed} requests were sent late because {concurrency_max} requests "
                f"were in flight (--max-concurrency){sent_late}"
            )
        if growth := self._queue_growth_ms():
            yield (
                f"the server was saturated: the median time to first token rose from {growth[0]:.0f} ms in the first "
                f"quarter of the requests to {growth[1]:.0f} ms in the last quarter, so requests waited in its queue"
            )
        for url, cpus in self.server_cpus.items():
            if cpus >= BUSY_CPU:
                yield f"the server was saturated: the process at {url} used {cpus:.2f} CPUs on average"

    def _queue_growth_ms(self) -> tuple[float, float] | None:
        """Return the median time to first token of the first and of the last quarter; None if it hardly grew."""
        quarter = len(self.first_token_ms) // QUARTER
        if len(self.first_token_ms) < QUEUE_REQUESTS_MIN:
            return None
        first = [one for one in self.first_token_ms[:quarter] if one is not None]
        last = [one for one in self.first_token_ms[-quarter:] if one is not None]
        if not first or not last:
            return None
        before, after = statistics.median(first), statistics.median(last)
        return (before, after) if after - before >= max(QUEUE_GROWTH_MS, before) else None


def _rate(times_s: Sequence[float]) -> float | None:
    """Return the mean rate from the first to the last of these times; None if all are equal."""
    lasted_s = max(times_s, default=0.0) - min(times_s, default=0.0)
    return (len(times_s) - 1) / lasted_s if lasted_s else None


class NoSystem(Exception):
    """No forebay system responds at the URL. The message says what failed."""


@dataclass(slots=True)
class TraceOutcome:
    """What a trace measured so far: latencies in milliseconds, token counts, pace and failures of the requests."""

    sent: int = 0
    interrupted: int = 0  # number of the signal that ended the trace early; 0 if none did
    ttft_ms: "array[float]" = field(default_factory=lambda: array("d"))  # times to first token
    itl_ms: "array[float]" = field(default_factory=lambda: array("d"))  # mean times between the tokens of a response
    e2e_ms: "array[float]" = field(default_factory=lambda: array("d"))  # times to the last token
    prompt_tokens: int = 0  # prompt tokens of completed requests
    cached_tokens: int = 0  # the part of `prompt_tokens` that was found in a cache
    output_tokens: int = 0  # tokens of complete responses
    computed: dict[str, int] = field(default_factory=dict)  # computed prompt tokens by worker
    requests: dict[str, int] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)  # remote prefills by worker
    failures: FailureCounts = field(default_factory=FailureCounts)  # failed requests by kind
    ends: dict[str, int] = field(default_factory=dict)  # complete responses by request id
    roles: dict[str, str] = field(default_factory=dict)  # role of each worker, idle workers included
    silent: list[str] = field(default_factory=list)  # URLs that did not respond with metrics at the end
    pace: Pace = field(default_factory=Pace)  # when requests were due and sent

    def add(self, response: StreamedResponse, *, is_complete: bool) -> None:
        """Add a response, and its latencies and tokens if it is complete."""
        for name in response.usage_ids:
            self.ends[name] = self.ends.get(name, 0) + 1
        if not is_complete:
            return
        self.ttft_ms.append(response.ttft_ms)
        self.e2e_ms.append((response.ended_s - response.sent_s) * 1e3)
        if response.output_tokens > 1:
            self.itl_ms.append(response.itl_s * 1e3)
        prompt_tokens, cached = response.usage["prompt_tokens"], response.cached_tokens
        self.prompt_tokens += prompt_tokens
        self.output_tokens += response.output_tokens
        self.cached_tokens += cached
        computed_by, worker = response.computed_by, response.worker
        self.computed[computed_by] = self.computed.get(computed_by, 0) + prompt_tokens - cached
        if computed_by != worker:
            self.prompts[computed_by] = self.prompts.get(computed_by, 0) + 1
        self.requests[worker] = self.requests.get(worker, 0) + 1


async def play(
    workload: Workload,
    urls: list[str],
    headers: Mapping[str, str],
    concurrency_max: int,
    outcome: TraceOutcome,
    ended: Callable[[], None],
) -> None:
    """Play a workload and record what happens in `outcome`. SIGINT and SIGTERM end it early.

    The URLs share the requests. `ended` is called for each completed or failed request. Raises NoSystem if the system
    does not respond at the start.
    """
    limits = httpx.Limits(max_connections=concurrency_max, max_keepalive_connections=256)
    async with httpx.AsyncClient(headers=headers, timeout=TIMEOUT_S, limits=limits) as client:
        with _interrupts(outcome):
            try:
                model = await _model(client, urls)
                await _Player(client, model, workload, urls, concurrency_max, outcome, ended).run()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or not outcome.interrupted:
                    raise
                task.uncancel()


@contextmanager
def _interrupts(outcome: TraceOutcome) -> Iterator[None]:
    """Cancel the current task on the first signal. The second signal ends the process."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def interrupt(number: int) -> None:
        outcome.interrupted = number
        for one in SIGNALS:
            loop.remove_signal_handler(one)
        task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _model(client: httpx.AsyncClient, urls: list[str]) -> str:
    """Return the name of the first model that the system serves."""
    try:
        response = await client.get(f"{urls[0]}/v1/models")
    except (httpx.TransportError, httpx.InvalidURL) as error:
        text = f"no response from {' or '.join(urls)} ({error!r}); {advice(error)}"
        raise NoSystem(text) from error
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise NoSystem(f"{urls[0]}: the API key is missing or wrong; set {API_KEY_VARIABLE} or --api-key")
    if response.status_code != httpx.codes.OK:
        failure = status_failure(response.status_code, response.content)
        raise NoSystem(f"{urls[0]}/v1/models: got {failure.kind}: {failure.text}; check --url")
    try:
        name = response.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise NoSystem(f"{urls[0]}/v1/models: lists no model; give the URL of an OpenAI-compatible API") from None
    return str(name)


@dataclass
class _Player:
    """Plays one workload: each request waits until it is due and at most `concurrency_max` requests are in flight."""

    client: httpx.AsyncClient
    model: str
    workload: Workload
    urls: list[str]
    concurrency_max: int
    outcome: TraceOutcome
    on_end: Callable[[], None]

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.concurrency_max)
        self._run = uuid.uuid4().hex
        self._began_s = 0.0
        self._ended: list[asyncio.Future[float]] = []  # by number; seconds from the start

    async def run(self) -> None:
        outcome, pace = self.outcome, self.outcome.pace
        cpu_s = await self._read_metrics()
        self._began_s = time.monotonic()
        watch = asyncio.create_task(pace.watch_client())
        try:
            async with asyncio.TaskGroup() as group:
                for turn in self.workload.turns():
                    self._ended.append(asyncio.get_running_loop().create_future())
                    body = None  # a dependent request waits in its own task, without blocking the others
                    if not turn.after:
                        body = self._body(turn)
                        await self._until(turn.at_us / 1e6)
                        await self._acquire()
                    group.create_task(self._send_due(turn, body))
        finally:
            watch.cancel()
            pace.lasted_s = self._now_s()
        ended_cpu_s = await self._read_metrics()
        outcome.silent = [url for url in self.urls if url not in ended_cpu_s]
        for url in cpu_s.keys() & ended_cpu_s.keys():
            before, after = cpu_s[url], ended_cpu_s[url]
            if before is not None and after is not None and after >= before:
                pace.server_cpus[url] = (after - before) / max(pace.lasted_s, 1e-3)

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._now_s()))

    async def _acquire(self) -> None:
        self.outcome.pace.delayed += self._room.locked()
        await self._room.acquire()

    async def _send_due(self, turn: Turn, body: bytes | None) -> None:
        """Send a request. `body` is None for a dependent request, which first waits for others."""
        due_s = turn.at_us / 1e6
        if body is None:
            answered_s = await asyncio.gather(*(self._ended[one] for one in turn.after))
            due_s = max(due_s, max(answered_s) + turn.delay_us / 1e6)
            await self._until(due_s)
            await self._acquire()
            body = self._body(turn)
        outcome, pace = self.outcome, self.outcome.pace
        number, outcome.sent = outcome.sent, outcome.sent + 1
        sent_s = self._now_s()
        pace.late_ms.append(max(0.0, sent_s - due_s) * 1e3)
        pace.first_token_ms.append(None)
        if not turn.after:
            pace.due_s.append(due_s)
            pace.sent_s.append(sent_s)
        try:
            failure, first_token_ms = await self._send(turn, body)
        finally:
            self._room.release()
        if failure is None:
            pace.first_token_ms[number] = first_token_ms
        else:
            outcome.failures.add(failure)
        self._ended[turn.number].set_result(self._now_s())
        self.on_end()

    def _body(self, turn: Turn) -> bytes:
        fields = {"model": self.model, "prompt": prompt(turn, self.workload.block_tokens)}
        return streaming_body(turn.output_tokens, fields)

    async def _send(self, turn: Turn, body: bytes) -> tuple[Failure | None, float]:
        """Send a request, again while its group has no owner. Return the failure, or None and the time to first token.

        Latencies count from the first attempt.
        """
        url = self.urls[turn.number % len(self.urls)]
        headers = {"x-request-id": f"trace-{self._run}-{turn.number}"}
        response = StreamedResponse(turn.output_tokens)
        failure = await response.follow(self.client, url, body, headers)
        while response.retry_s is not None and time.perf_counter() < response.sent_s + RETRY_S:
            await asyncio.sleep(response.retry_s)
            failure = await response.follow(self.client, url, body, headers)
        self.outcome.add(response, is_complete=failure is None)
        return failure, response.ttft_ms

    async def _read_metrics(self) -> dict[str, float | None]:
        """Read the roles of workers. Return the CPU seconds of each server that responds, None if it exports none."""
        found: dict[str, float | None] = {}
        for url in self.urls:
            try:
                text = (await self.client.get(f"{url}/metrics", timeout=METRICS_TIMEOUT_S)).text
                roles, cpu_s = _parse_metrics(text)
            except (httpx.HTTPError, ValueError):  # ValueError: not metrics
                continue
            self.outcome.roles |= roles
            found[url] = cpu_s
        return found


def _parse_metrics(text: str) -> tuple[dict[str, str], float | None]:
    """Return the role of every worker, including idle ones, and the CPU seconds of the process if it exports them."""
    roles: dict[str, str] = {}
    cpu_s = None
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.name == "dynamo_frontend_worker_active_prefill_tokens":
                roles[sample.labels["worker_id"]] = sample.labels.get("worker_type", "aggregated")
            elif sample.name == "process_cpu_seconds_total":
                cpu_s = sample.value
    return roles, cpu_s


def prompt(turn: Turn, block_tokens: int) -> list[int]:
    """Return prompt tokens of a request. Equal block ids give equal tokens; prompts without block ids share none."""
    if not turn.block_ids:
        return list(_tokens_of(f"turn {turn.number}", turn.prompt_tokens))
    tokens: list[int] = []
    for block in turn.block_ids:
        tokens += _tokens_of(block, block_tokens)
    return tokens[: turn.prompt_tokens]


@lru_cache(maxsize=CACHED_TOKENS // 512)
def _tokens_of(what: int | str, count: int) -> tuple[int, ...]:
    rng = random.Random(what)  # noqa: S311 - nothing secret
    return tuple(rng.randrange(TOKEN_IDS) for _ in range(count))
