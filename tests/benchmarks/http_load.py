"""A load generator over HTTP, run as a process of its own: `python -m tests.benchmarks.http_load`.

It sends streamed chat completions to any OpenAI-compatible server, so every measured system gets the same requests from
the same client. Each connection sends its next request when the previous response has ended. With `--rate` requests are
sent at random times, each on a connection of its own, whatever became of earlier ones. Prints one JSON object.

Responses are only stored with their times of arrival while requests are in flight, and parsed after the run. So the
client takes little CPU time from the servers of the same machine.
"""

import argparse
import asyncio
import json
import os
import random
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

VOCABULARY = ("def", "return", "self", "import", "class", "value", "result", "item", "list", "error", "string", "time")
SEED = 1
GROUPS = 16  # different shared prefixes, each of half a prompt
EVENT, LAST_EVENT = re.compile(rb"^data: ?([^\r\n]*)", re.MULTILINE), b"[DONE]"
CRLF = b"\r\n"
LAST_CHUNK = b"0\r\n\r\n"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
REFUSALS = ("429", "503", "529")  # with --rate, these are counted and are no failures
PATIENCE_S = 40.0  # with --rate, a longer response counts as failed


def request_bytes(args: argparse.Namespace) -> Iterator[bytes]:
    """Yield the warm-up requests and then the measured ones, each a whole HTTP request."""
    url = urlsplit(args.url)
    path = "/v1/completions" if args.text else "/v1/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    if args.api_key:
        head += f"Authorization: Bearer {args.api_key}\r\n"
    shared = args.words // 2
    rng = random.Random(SEED)
    prefixes = [_words(rng, shared) for _ in range(GROUPS)]
    models = args.model.split(",")
    for number in range(args.warmup + args.requests):
        rng = random.Random(SEED * 7919 + number)
        prompt = f"{rng.choice(prefixes)} {_words(rng, args.words - shared)}"
        asked = {"prompt": prompt} if args.text else {"messages": [{"role": "user", "content": prompt}]}
        body = json.dumps(
            {"model": models[number % len(models)], **asked, "max_tokens": args.max_tokens, "stream": True}
        ).encode()
        yield f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(VOCABULARY) + str(rng.randrange(10)) for _ in range(count))


# --- one connection ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Response:
    """A response as it arrived.

    Attributes:
        sent_s: time at which the request was sent, or with `--rate` was due; all times are of one monotonic clock.
        arrivals: length of `received` after each read from the socket, and time of the read.
        body_at: offset of the body, -1 before the head is complete.
    """

    sent_s: float
    received: bytearray = field(default_factory=bytearray)
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    body_at: int = -1

    @property
    def ended_s(self) -> float:
        """Return the time at which the last byte arrived."""
        return self.arrivals[-1][1]

    @property
    def status(self) -> str:
        return self.received[9:12].decode()

    def trouble(self) -> str:
        """Return why the response is no complete stream, or an empty string."""
        if self.status != "200":
            return repr(bytes(self.received[:300]))
        if LAST_EVENT not in self.received:
            return f"an unfinished stream: {bytes(self.received[-300:])!r}"
        return ""

    def events(self) -> list[tuple[float, bytes]]:
        """Return the time of arrival and the data of every event, the last one (`[DONE]`) included."""
        body, ends = bytearray(), []  # without the framing of chunks, which may split an event
        reads = iter(self.arrivals)
        length, at_s = next(reads)
        position = self.body_at
        while True:
            data_at = self.received.index(CRLF, position) + len(CRLF)
            position = data_at + int(self.received[position:data_at], 16)
            while length < position:
                length, at_s = next(reads)
            if position == data_at:
                break
            body += self.received[data_at:position]
            ends.append((len(body), at_s))
            position += len(CRLF)
        chunks = iter(ends)
        length, at_s = next(chunks)
        found = []
        for match in EVENT.finditer(body):
            while length < match.end():
                length, at_s = next(chunks)
            found.append((at_s, match[1]))
        return found


def has_text(data: bytes) -> bool:
    """Return whether the data of an event contain text of the completion."""
    choices = [] if data == LAST_EVENT else json.loads(data).get("choices")
    return bool(choices and (choices[0].get("text") or choices[0].get("delta", {}).get("content")))


class Connection(asyncio.Protocol):
    """A keep-alive connection with at most one request in flight."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[Response] | None = None
        self._length: int | None = None  # of a body that is no stream, such as an error
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass
        self._socket = transport.get_extra_info("socket")

    def send(self, request: bytes) -> asyncio.Future[Response]:
        self._ended = asyncio.get_running_loop().create_future()
        self._response = Response(time.perf_counter())
        self._transport.write(request)
        self._acknowledge_at_once()
        return self._ended

    def data_received(self, data: bytes) -> None:
        """Store data. The end of the chunked body ends the response."""
        self._acknowledge_at_once()
        response = self._response
        response.received += data
        response.arrivals.append((len(response.received), time.perf_counter()))
        if response.body_at < 0 and (blank := response.received.find(b"\r\n\r\n")) >= 0:
            response.body_at = blank + 4
            length = re.search(rb"\r\ncontent-length: *(\d+)", response.received[:blank].lower())
            self._length = int(length[1]) if length else None
        if response.body_at >= 0 and self._complete():
            assert self._ended is not None
            self._ended.set_result(response)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request in flight."""
        self.closed = True
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(exc or ConnectionError("closed before the response was complete"))

    def close(self) -> None:
        self._transport.abort()

    def _complete(self) -> bool:
        response = self._response
        if self._length is None:  # a stream
            return response.received.endswith(LAST_CHUNK)
        return len(response.received) - response.body_at >= self._length

    def _acknowledge_at_once(self) -> None:
        """Set TCP_QUICKACK, which Linux resets, around every exchange.

        A server with Nagle's algorithm keeps its second small write until the client acknowledges the first, usually
        40 ms later. Without this delay the other differences between servers become visible.
        """
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


# --- CPU time of the servers ------------------------------------------------------------------------------------------


def named_pids(text: str) -> dict[str, list[int]]:
    """Return the pids by name of `frontend=12,worker=13,worker=14` or of lines `frontend 12`."""
    found: dict[str, list[int]] = {}
    for name, pid in re.findall(r"([A-Za-z][\w-]*)[ =](\d+)", text):
        found.setdefault(name, []).append(int(pid))
    return found


def cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU time so far of these processes and their running descendants, in steps of 10 ms."""
    ticks = 0
    for pid in {one for root in pids for one in _with_descendants(root)}:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            raise SystemExit(f"process {pid} has ended") from None
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


def _with_descendants(pid: int) -> list[int]:
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found += _with_descendants(int(child))
    return found


# --- the run ----------------------------------------------------------------------------------------------------------


async def connect(url: str) -> Connection:
    """Open a connection. Raises OSError."""
    parts = urlsplit(url)
    assert parts.hostname is not None, url
    _, connection = await asyncio.get_running_loop().create_connection(Connection, parts.hostname, parts.port or 80)
    return connection


async def drive(url: str, connections: list[Connection], todo: Iterator[bytes]) -> tuple[list[Response], list[str]]:
    """Let every connection take the next request until none is left; return responses, and failed connections."""
    responses: list[Response] = []
    failures: list[str] = []

    async def run(slot: int) -> None:
        for request in todo:
            try:
                if connections[slot].closed:
                    connections[slot] = await connect(url)
                responses.append(await connections[slot].send(request))
            except OSError as error:
                failures.append(repr(error))

    await asyncio.gather(*(run(slot) for slot in range(len(connections))))
    return responses, failures


async def offer(url: str, rate: float, requests: Iterable[bytes]) -> tuple[list[Response], list[str]]:
    """Send the requests at random times, `rate` per second on average; return responses, and failures."""
    chance, responses, failures = random.Random(SEED), [], []

    async def run(request: bytes, due_s: float) -> None:
        await asyncio.sleep(due_s - time.perf_counter())
        try:
            async with asyncio.timeout(PATIENCE_S):
                connection = await connect(url)
                response = await connection.send(request)
        except OSError as error:  # TimeoutError, too
            failures.append(repr(error))
            return
        connection.close()
        response.sent_s = due_s
        responses.append(response)

    due_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for request in requests:
            due_s += chance.expovariate(rate)
            group.create_task(run(request, due_s))
    return responses, failures


def refusals(responses: Sequence[Response]) -> dict[str, Any]:
    """Return number and latencies of the error responses by status and code, and how many lack Retry-After."""
    found: dict[str, list[Response]] = {}
    for response in responses:
        code = re.search(rb'"code": ?"(\w+)"', response.received)
        found.setdefault(f"{response.status} {code[1].decode() if code else ''}", []).append(response)
    return {
        "refused_ms": {
            name: {"count": len(some), **(quantiles_ms([one.ended_s - one.sent_s for one in some]) or {})}
            for name, some in found.items()
        },
        "without_retry_after": sum(b"retry-after:" not in one.received.lower() for one in responses),
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Send the warm-up, then the measured requests, and return the measurements."""
    todo = list(request_bytes(args))
    pids = named_pids(args.pids)
    try:
        connections = [await connect(args.url) for _ in range(args.conc)]
    except OSError as error:
        raise SystemExit(f"no connection to {args.url}: {error}; start the server first") from None
    await drive(args.url, connections, iter(todo[: args.warmup]))
    cpu_before = {name: cpu_s(group) for name, group in pids.items()}
    own_before, began_s = time.process_time(), time.perf_counter()
    offered = offer(args.url, args.rate, todo[args.warmup :]) if args.rate else None
    responses, failures = await (offered or drive(args.url, connections, iter(todo[args.warmup :])))
    wall_s, own_s = time.perf_counter() - began_s, time.process_time() - own_before
    cpu_used = {name: cpu_s(group) - cpu_before[name] for name, group in pids.items()}
    refused = [one for one in responses if args.rate and one.status in REFUSALS]
    responses = [one for one in responses if not (args.rate and one.status in REFUSALS)]
    failures += [trouble for response in responses if (trouble := response.trouble())]
    responses = [response for response in responses if not response.trouble()]
    each = max(len(responses), 1)
    events = [response.events() for response in responses]
    text_times_s = [[at_s for at_s, data in one if has_text(data)] for one in events]
    gaps_s = [later - earlier for times_s in text_times_s for earlier, later in pairwise(times_s)]
    return {
        "requests": len(responses),
        "failed": len(failures),
        "first_failure": failures[0] if failures else "",
        "requests_per_s": round(len(responses) / wall_s, 1),
        "ttft_ms": quantiles_ms(first[0][0] - one.sent_s for one, first in zip(responses, events, strict=True)),
        "itl_ms": quantiles_ms(gaps_s),  # between two events with text, 0 if one read had both
        "e2e_ms": quantiles_ms(response.ended_s - response.sent_s for response in responses),
        "events_per_request": round(sum(map(len, events)) / each, 1),
        "cpu_us_per_request": {name: round(used / each * 1e6) for name, used in cpu_used.items()},
        "client_cpu_us_per_request": round(own_s / each * 1e6),
        "load_average": os.getloadavg()[0],
        **(refusals(refused) if args.rate else {}),
    }


def quantiles_ms(values_s: Iterator[float] | Sequence[float]) -> dict[str, float] | None:
    """Return p50, p90 and p99 in ms, or None without values."""
    ordered = sorted(values_s)
    if not ordered:
        return None
    at = {f"p{part}": ordered[min(len(ordered) - 1, len(ordered) * part // 100)] for part in (50, 90, 99)}
    return {name: round(value * 1e3, 2) for name, value in at.items()}


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the server, without /v1 (http only)")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--conc", type=int, default=16, help="connections, each with one request in flight")
    parser.add_argument("--requests", type=int, default=2000, help="measured requests")
    parser.add_argument("--warmup", type=int, default=50, help="unmeasured requests before the measured ones")
    parser.add_argument("--words", type=int, default=200, help="words per prompt")
    parser.add_argument("--text", action="store_true", help="text completions instead of chat completions")
    parser.add_argument("--max-tokens", type=int, default=1)
    parser.add_argument("--rate", type=float, help="requests per second, instead of a request after each response")
    parser.add_argument("--pids", default="", help="processes whose CPU time to report: frontend=12,worker=13")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(measure(args))))


if __name__ == "__main__":
    main()
