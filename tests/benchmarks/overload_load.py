"""An open-loop load generator over HTTP, run as a process of its own: `python -m tests.benchmarks.overload_load`.

Each request has a connection of its own, and is sent at its time whatever became of those before it. Prints one JSON
object: how many requests ended how, their latencies, and the memory of the processes that serve them.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvloop

SEED = 20_261_122
RSS_EVERY_S = 1.0
RETRY_HEADER = b"retry-after:"


@dataclass(slots=True)
class Outcome:
    """The outcome of one request; times are seconds since its planned start, `code` is its error code."""

    status: int = 0
    code: str = ""
    first_s: float = 0.0
    ended_s: float = 0.0
    trouble: str = ""
    retry_after: bool = False


class Client(asyncio.Protocol):
    """Sends one request and reads its answer until the server closes the connection."""

    def __init__(self, request: bytes, due_s: float, outcome: Outcome) -> None:
        self._request = request
        self._due_s = due_s
        self._outcome = outcome
        self._head = bytearray()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Keep the head and the start of the body; later data is only timed."""
        if not self._outcome.status:
            self._outcome.first_s = time.monotonic() - self._due_s
        if len(self._head) < 4_096:
            self._head += data
            if not self._outcome.status and self._head.startswith(b"HTTP/1.1 ") and len(self._head) > 12:
                self._outcome.status = int(self._head[9:12])

    def connection_lost(self, exc: Exception | None) -> None:
        """Record the end of the response."""
        outcome = self._outcome
        outcome.ended_s = time.monotonic() - self._due_s
        head = bytes(self._head)
        outcome.retry_after = RETRY_HEADER in head.lower()
        if b'"code":"' in head:
            outcome.code = head.partition(b'"code":"')[2].partition(b'"')[0].decode()
        if not outcome.trouble and (exc is not None or not outcome.status):
            outcome.trouble = "closed" if exc is None else type(exc).__name__
        if not self.closed.done():
            self.closed.set_result(None)


def request_bytes(host: str, model: str, number: int, words: int, max_tokens: int) -> bytes:
    """Return a streamed chat completion request with a unique prompt."""
    chance = random.Random(SEED + number)
    text = " ".join(f"w{chance.randrange(10_000)}" for _ in range(words))
    body = json.dumps(
        {
            "model": model,
            "stream": True,
            "max_tokens": max_tokens,
            "messages": [{"role": "user", "content": f"{number} {text}"}],
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def one(address: tuple[str, int], request: bytes, due_s: float, patience_s: float, outcome: Outcome) -> None:
    await asyncio.sleep(due_s - time.monotonic())
    transport = None
    try:
        async with asyncio.timeout(patience_s):
            transport, client = await asyncio.get_running_loop().create_connection(
                lambda: Client(request, due_s, outcome), *address
            )
            await client.closed
    except TimeoutError:
        outcome.trouble = "hung"
    except OSError as error:
        outcome.trouble = type(error).__name__
    finally:
        if transport is not None:
            transport.abort()


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process, or 0 after its end."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4_096
    except OSError:
        return 0


async def sample_rss(pids: list[int], found: list[tuple[float, int]]) -> None:
    """Sample the total memory of these processes until cancelled."""
    began_s = time.monotonic()
    while True:
        found.append((time.monotonic() - began_s, sum(map(rss_bytes, pids))))
        await asyncio.sleep(RSS_EVERY_S)


async def offer(args: argparse.Namespace) -> dict[str, Any]:
    """Apply the load and return the outcomes."""
    chance = random.Random(SEED)
    addresses = [(host, int(port)) for host, _, port in (url.rpartition(":") for url in args.to.split(","))]
    outcomes: list[Outcome] = []
    rss: list[tuple[float, int]] = []
    sampling = asyncio.create_task(sample_rss([int(pid) for pid in args.pids.split(",") if pid], rss))
    due_s, ends_s = time.monotonic() + 0.5, time.monotonic() + 0.5 + args.seconds
    async with asyncio.TaskGroup() as group:
        number = 0
        while due_s < ends_s:
            address = addresses[number % len(addresses)]
            payload = request_bytes(address[0], args.model, number, args.words, args.max_tokens)
            outcome = Outcome()
            outcomes.append(outcome)
            group.create_task(one(address, payload, due_s, args.patience_s, outcome))
            number += 1
            due_s += chance.expovariate(args.rate)
            await asyncio.sleep(max(0.0, due_s - time.monotonic() - 0.2))
    sampling.cancel()
    return summary(outcomes, rss, args.seconds)


def summary(outcomes: list[Outcome], rss: list[tuple[float, int]], seconds: float) -> dict[str, Any]:
    served = [one for one in outcomes if one.status == 200 and not one.trouble]
    by_code: dict[str, list[float]] = {}
    for refused in outcomes:
        if refused.status not in (0, 200) and not refused.trouble:
            by_code.setdefault(f"{refused.status} {refused.code}", []).append(refused.first_s)
    late = [size for at_s, size in rss if seconds - 20 <= at_s <= seconds]
    return {
        "offered": len(outcomes),
        "served": len(served),
        "served_per_s": round(len(served) / seconds, 1),
        "errors_in_stream": sum(bool(one.code) for one in served),
        "ttft_ms": percentiles([one.first_s for one in served]),
        "e2e_ms": percentiles([one.ended_s for one in served]),
        "refused_ms": {name: {"count": len(values), **percentiles(values)} for name, values in by_code.items()},
        "without_retry_after": sum(one.status in (429, 503, 529) and not one.retry_after for one in outcomes),
        "trouble": dict(Counter(one.trouble for one in outcomes if one.trouble)),
        "rss_mb": [round(size / 1e6) for _, size in rss][:: max(1, len(rss) // 12)],
        "rss_growth_last_20_s": round(late[-1] / late[0] - 1, 4) if len(late) > 1 and late[0] else None,
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """Return p50, p99 and the maximum, in milliseconds."""
    if not values:
        return {}
    ordered = sorted(values)
    picked = {"p50": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "max": len(ordered) - 1}
    return {name: round(1e3 * ordered[min(at, len(ordered) - 1)], 1) for name, at in picked.items()}


def main() -> None:
    """Apply the load of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", required=True, help="HOST:PORT of each ingress, separated by commas; used in turn")
    parser.add_argument("--model", default="forebay-default")
    parser.add_argument("--rate", type=float, required=True, help="requests per second, Poisson")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--words", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument(
        "--patience-s", type=float, default=40.0, help="seconds after which a request counts as hanging"
    )
    parser.add_argument("--pids", default="", help="process ids whose memory is added up, separated by commas")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(offer(args))))


if __name__ == "__main__":
    main()
