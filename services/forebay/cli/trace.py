"""`forebay trace`: play a workload into a running system over HTTP, and report latencies."""

import asyncio
import json as jsonlib
import statistics
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import msgspec
import typer
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from forebay.cli.common.errors import fail
from forebay.cli.common.terminal import bar
from forebay.simulate.outcome import percentiles
from forebay.simulate.reading import open_workload
from forebay.simulate.workload import Turn, Workload, WorkloadOptions, WorkloadUnusable
from forebay.simulate.workloads.prompts import prompt

IN_FLIGHT_MAX = 4_000  # requests in flight; a system that falls behind delays the trace instead of exhausting sockets
TIMEOUT_S = 900.0
URL = "http://127.0.0.1:8000"
RETRY_S = 60.0  # seconds to retry a request while its group has no owner; a failover takes seconds
WORKING = ("aggregated", "prefill", "decode")


@dataclass(slots=True)
class TraceOutcome:
    """What `forebay trace` measured: latencies in milliseconds, token counts and failures of the requests."""

    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    e2e_ms: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    computed: dict[str, int] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)  # remote prefills by worker
    failures: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)  # complete responses by request id


def trace(
    workload: Annotated[str, typer.Argument(help="File, folder or generator; see docs/workloads.md.")],
    speed: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="Divide the times between arrivals by this; think times stay.")
    ] = 1.0,
    url: Annotated[
        list[str] | None,
        typer.Option(help="URL of the running system; several URLs share the requests.", show_default=URL),
    ] = None,
    duration_s: Annotated[float | None, typer.Option(min=0.001, help="Play only the first seconds.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Play a recorded or synthetic workload into a running system. Exits 1 if a request failed."""
    urls = [one.rstrip("/") for one in url or [URL]]
    try:
        todo = open_workload(workload, WorkloadOptions(speed=speed, duration_s=duration_s))
        requests = todo.survey().requests
    except WorkloadUnusable as error:
        fail(str(error))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        bar(*columns) as progress,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        task = progress.add_task("answered", total=requests)
        try:
            outcome, roles = runner.run(_play(todo, urls, lambda: progress.advance(task)))
        except (httpx.TransportError, httpx.InvalidURL) as error:
            fail(f"no response from {' or '.join(urls)} ({error!r}); start a system with `forebay up`")
    summary = summarise(outcome, roles)
    if json:
        typer.echo(jsonlib.dumps(summary))
    else:
        _show(summary)
    if summary["failed"] or summary["answered_again"]:
        raise typer.Exit(1)


async def _play(
    workload: Workload, urls: list[str], answered: Callable[[], None]
) -> tuple[TraceOutcome, dict[str, str]]:
    outcome = TraceOutcome()
    limits = httpx.Limits(max_connections=IN_FLIGHT_MAX, max_keepalive_connections=256)
    run = uuid.uuid4().hex
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        model = (await client.get(f"{urls[0]}/v1/models")).raise_for_status().json()["data"][0]["id"]
        room = asyncio.Semaphore(IN_FLIGHT_MAX)
        began_s = time.monotonic()
        ended: list[asyncio.Future[None]] = []  # by number

        async def until(at_us: int) -> None:
            await asyncio.sleep(max(0.0, began_s + at_us / 1e6 - time.monotonic()))

        async def send(turn: Turn, body: bytes | None) -> None:
            if body is None:
                await asyncio.gather(*(ended[one] for one in turn.after))
                await asyncio.sleep(turn.delay_us / 1e6)
                await until(turn.at_us)
                await room.acquire()
            request = _TracedRequest(urls[turn.number % len(urls)], f"trace-{run}-{turn.number}", turn)
            try:
                await _send(client, request, body or _body(model, turn, workload.block_tokens), outcome)
            finally:
                room.release()
                ended[turn.number].set_result(None)
            answered()

        async with asyncio.TaskGroup() as group:
            for turn in workload.turns():
                ended.append(asyncio.get_running_loop().create_future())
                body = None  # a dependent request waits in its own task, without blocking the others
                if not turn.after:
                    body = _body(model, turn, workload.block_tokens)
                    await room.acquire()
                    await until(turn.at_us)
                group.create_task(send(turn, body))
        roles: dict[str, str] = {}
        for url in urls:
            roles |= _workers((await client.get(f"{url}/metrics")).text)
    return outcome, roles


@dataclass(frozen=True, slots=True)
class _TracedRequest:
    """Request, and the URL that it is sent to."""

    url: str
    request_id: str
    turn: Turn


def _body(model: str, turn: Turn, block_tokens: int) -> bytes:
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt(turn, block_tokens),
            "max_tokens": turn.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


class _NoOwner(Exception):
    """No router owns the group at the moment. Retry the request after `after_s` seconds."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"{response.status_code} {response.content[:200]!r}")
        self.after_s = float(response.headers["retry-after"])


async def _send(client: httpx.AsyncClient, request: _TracedRequest, body: bytes, outcome: TraceOutcome) -> None:
    began_s = time.perf_counter()
    while True:
        try:
            problem = await _stream_response(client, body, request, outcome, began_s)
        except _NoOwner as refused:
            if time.perf_counter() < began_s + RETRY_S:
                await asyncio.sleep(refused.after_s)
                continue
            problem = str(refused)
        except httpx.HTTPError as error:
            problem = repr(error)
        break
    if problem:
        outcome.failures[problem] = outcome.failures.get(problem, 0) + 1


async def _stream_response(
    client: httpx.AsyncClient, body: bytes, request: _TracedRequest, outcome: TraceOutcome, sent_s: float
) -> str:
    """Send a request, follow its stream and record its latencies. Return the problem, or an empty text.

    Args:
        client: HTTP client.
        body: body of the request.
        request: the request.
        outcome: where to record latencies.
        sent_s: time of the first attempt, from which latencies count.

    Raises:
        _NoOwner: no router owns the group.
    """
    first_s = last_s = 0.0
    usage: dict[str, Any] | None = None
    done = False
    headers = {"content-type": "application/json", "x-request-id": request.request_id}
    async with client.stream("POST", f"{request.url}/v1/completions", content=body, headers=headers) as response:
        if response.status_code != httpx.codes.OK:
            content = await response.aread()
            if b'"no_owner"' in content and "retry-after" in response.headers:
                raise _NoOwner(response)
            return f"{response.status_code} {content[:200]!r}"
        worker = computed_by = response.headers.get("x-forebay-worker", "")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            last_s = time.perf_counter()
            first_s = first_s or last_s
            if line == "data: [DONE]":
                done = True
            elif '"error"' in line and '"choices"' not in line:
                return line[:200]
            elif '"usage"' in line:
                chunk = jsonlib.loads(line.removeprefix("data: "))
                usage = chunk.get("usage")
                outcome.ends[chunk["id"]] = outcome.ends.get(chunk["id"], 0) + 1
            elif '"forebay"' in line:
                served = jsonlib.loads(line.removeprefix("data: ")).get("forebay", {})
                computed_by = served.get("prefill", {}).get("worker", worker)
    if not done or usage is None:
        return "the stream ended before its last event"
    output_tokens = request.turn.output_tokens
    if usage["completion_tokens"] != output_tokens:
        return f"got {usage['completion_tokens']} output tokens, expected {output_tokens}"
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    outcome.ttft_ms.append((first_s - sent_s) * 1e3)
    outcome.e2e_ms.append((last_s - sent_s) * 1e3)
    if output_tokens > 1:
        outcome.itl_ms.append((last_s - first_s) * 1e3 / (output_tokens - 1))
    outcome.prompt_tokens += usage["prompt_tokens"]
    outcome.output_tokens += usage["completion_tokens"]
    outcome.cached_tokens += cached
    outcome.computed[computed_by] = outcome.computed.get(computed_by, 0) + usage["prompt_tokens"] - cached
    if computed_by != worker:
        outcome.prompts[computed_by] = outcome.prompts.get(computed_by, 0) + 1
    outcome.requests[worker] = outcome.requests.get(worker, 0) + 1
    return ""


def _workers(metrics: str) -> dict[str, str]:
    """Return the role of every worker, including idle ones, because the balance refers to all workers."""
    return {
        sample.labels["worker_id"]: sample.labels.get("worker_type", "aggregated")
        for family in text_string_to_metric_families(metrics)
        if family.name == "dynamo_frontend_worker_active_prefill_tokens"
        for sample in family.samples
    }


def summarise(outcome: TraceOutcome, roles: Mapping[str, str]) -> dict[str, Any]:
    """Return the metrics as `--json` prints them. In a disaggregated fleet only prefill workers count for balance."""
    workers = [worker for worker, role in roles.items() if role in WORKING]
    computed = {worker: outcome.computed.get(worker, 0) for worker in sorted({*workers, *outcome.computed})}
    disaggregated = "prefill" in roles.values()
    balanced = [tokens for worker, tokens in computed.items() if not disaggregated or roles.get(worker) == "prefill"]
    mean = statistics.fmean(balanced) if balanced else 0.0
    return {
        "requests": len(outcome.e2e_ms),
        "failed": sum(outcome.failures.values()),
        "failures": outcome.failures,
        "answered_once": sum(count == 1 for count in outcome.ends.values()),
        "answered_again": sum(count > 1 for count in outcome.ends.values()),
        "prefix_reuse": outcome.cached_tokens / outcome.prompt_tokens if outcome.prompt_tokens else 0.0,
        "load_max_over_mean": max(balanced) / mean if mean else 0.0,
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "ttft_ms": percentiles(outcome.ttft_ms),
        "itl_ms": percentiles(outcome.itl_ms),
        "e2e_ms": percentiles(outcome.e2e_ms),
        "workers": {
            worker: {
                "requests": outcome.requests.get(worker, 0) + outcome.prompts.get(worker, 0),
                "computed_tokens": tokens,
            }
            for worker, tokens in computed.items()
        },
        "roles": dict(sorted(roles.items())),
    }


def _show(summary: dict[str, Any]) -> None:
    table = Table(title=f"{summary['requests']} requests completed, {summary['failed']} failed")
    for column in ("", "mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        times = summary[name]
        table.add_row(name, *(f"{times.get(key, float('nan')):.2f}" for key in ("mean", "p50", "p90", "p99")))
    console = Console()
    console.print(table)
    console.print(f"prefix reuse        {summary['prefix_reuse']:.3f} of {summary['prompt_tokens']} prompt tokens")
    console.print(f"load, max over mean {summary['load_max_over_mean']:.3f} of computed prompt tokens")
    for worker, counts in summary["workers"].items():
        role = summary["roles"].get(worker, "aggregated")
        name = worker if role == "aggregated" else f"{worker} ({role})"
        console.print(f"  {name}: {counts['requests']} requests, {counts['computed_tokens']} tokens computed")
    for problem, count in summary["failures"].items():
        console.print(f"  failed {count}x: {problem}", markup=False)
