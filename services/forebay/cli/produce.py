"""`forebay produce`: send request bodies from a file to the Kafka API, and print the responses."""

import asyncio
import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import click
import msgspec
from xxhash import xxh3_64_intdigest

from forebay.cli.command import ProduceCommand
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import kafka_log
from forebay.events.signing import sign
from forebay.events.topics import OPENAI_REQUESTS, OPENAI_RESPONSES
from forebay.ingress.openai.requests import CHAT_PATH, REQUEST_ID, TEXT_PATH
from forebay.processes.notices import complain
from forebay.runtime.files import read_text
from forebay.transport.base import Draft, LogFull, Tail
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import count_topics, partitions_of

ERROR_STATUS = 400
KEY_CHARS_MAX = 4_096
PAGE = 500  # records of responses that are read at a time


@dataclass(slots=True)
class ProduceRun:
    """Requests sent, records received per response, and number of responses with an error."""

    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    pieces: dict[str, list[msgspec.Raw]] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    errors: int = 0
    signing_key: bytes = field(default=b"", repr=False)

    def encode_request(self, number: int, line: bytes) -> tuple[str, str, bytes]:
        """Return request id, path and body of line `number`. The ingress reports what is wrong with the body."""
        request_id: Any = f"{self.run_id}-{number}"
        path = CHAT_PATH
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            content: Any = msgspec.json.decode(line)
            if isinstance(content, dict):
                path = TEXT_PATH if "prompt" in content else CHAT_PATH
                if "request_id" in content:
                    request_id, line = content.pop("request_id"), msgspec.json.encode(content)
        if not isinstance(request_id, str) or not REQUEST_ID.fullmatch(request_id):
            allowed = "use 1 to 128 letters, digits, dots, dashes or underscores"
            fail(f"line {number}: invalid request_id {request_id!r}; {allowed}")
        if request_id in self.pieces:
            fail(f"line {number}: duplicate request_id {request_id!r}")
        self.pieces[request_id] = []
        self.waiting.add(request_id)
        return request_id, path, line

    def add_record(self, headers: dict[str, str], value: bytes) -> dict[str, Any] | None:
        """Add a record of a response, unless it is repeated. Return the response if this completes it."""
        request_id = headers.get("request-id", "")
        if request_id not in self.waiting or headers.get("index") != str(len(self.pieces[request_id])):
            return None
        self.pieces[request_id].append(msgspec.Raw(value))
        if headers.get("last") != "1":
            return None
        self.waiting.discard(request_id)
        bodies, self.pieces[request_id] = self.pieces[request_id], []
        status = int(headers["status"])
        self.errors += status >= ERROR_STATUS
        content = {"body": bodies[0]} if len(bodies) == 1 else {"chunks": bodies}
        return {"request_id": request_id, "status": status, **content}


def run_produce(options: ProduceCommand) -> None:
    wait_s = options.timeout_s if options.wait else None
    run = ProduceRun(signing_key=b"" if options.signing_key is None else _signing_key(options.signing_key))
    try:
        with explained(), click.open_file(str(options.file), "rb") as file:
            asyncio.run(_produce(file, options.kafka.settings(), run, wait_s))
    except OSError as error:
        fail(f"{options.file}: {error.strerror}")
    finally:  # also if Kafka fails or the command is interrupted
        sent, missing = len(run.pieces), len(run.waiting)
        answers = f", {sent - missing} answered, {run.errors} of them with an error, {missing} missing"
        if sent:
            complain(f"{sent} requests sent" + ("" if wait_s is None else answers))
    if wait_s is not None and (run.errors or missing):
        raise click.exceptions.Exit(1)


def _signing_key(file: Path) -> bytes:
    """Return the text of a file. The command ends unless it is a key that signs."""
    try:
        with explained():
            key = read_text(f"--signing-key {file}", file, KEY_CHARS_MAX).encode()
        sign(key, "", {}, b"", 0)
    except (TypeError, ValueError):
        fail(f"--signing-key {file}: expected the output of `forebay keys create --signing`")
    return key


async def _produce(file: IO[bytes], settings: KafkaSettings, run: ProduceRun, wait_s: float | None) -> None:
    """Send every line. If `wait_s` is not None, wait that many seconds after the last line for the responses."""
    await count_topics(settings)
    partitions = await partitions_of(settings)
    async with kafka_log(settings) as log:
        is_sent, wake = asyncio.Event(), asyncio.Event()
        numbers = range(0 if wait_s is None else partitions[OPENAI_RESPONSES.name])
        places = [(OPENAI_RESPONSES.name, number) for number in numbers]
        tails = [log.tail(*place, await log.end(*place), wake) for place in places]
        collecting = asyncio.create_task(_collect(tails, wake, run, is_sent))
        try:
            await _send(file, log, settings.topic(OPENAI_REQUESTS.name), partitions[OPENAI_REQUESTS.name], run)
            is_sent.set()
            wake.set()
            await asyncio.wait([collecting], timeout=wait_s or 0.0)
            if collecting.done():
                collecting.result()
        finally:
            collecting.cancel()


async def _send(file: IO[bytes], log: KafkaLog, topic: str, partitions: int, run: ProduceRun) -> None:
    """Append a request per line. Raises LogError if Kafka rejects one."""
    async for number, line in _lines(file):
        request_id, path, body = run.encode_request(number, line)
        key = request_id.encode()
        headers = {"request-id": request_id, "path": path}
        if run.signing_key:
            headers = sign(run.signing_key, topic, headers, body, time.time_ns() // 1_000_000)
        draft = Draft(OPENAI_REQUESTS.name, xxh3_64_intdigest(key) % partitions, body, key, headers)
        try:
            log.append_soon([draft])
        except LogFull:
            await log.flush()
            log.append_soon([draft])
        except ValueError as error:  # it is too large
            fail(f"line {number}: {error}")
    await log.flush()


async def _collect(tails: Sequence[Tail], wake: asyncio.Event, run: ProduceRun, is_sent: asyncio.Event) -> None:
    """Print complete responses, until the last one after the last request was sent."""
    while run.waiting or not is_sent.is_set():
        await wake.wait()
        wake.clear()
        for tail in tails:
            while records := tail.take(PAGE):
                for record in records:
                    if answer := run.add_record(dict(record.headers or {}), record.value):
                        click.echo(msgspec.json.encode(answer))


async def _lines(file: IO[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """Yield numbered lines that are not blank. Neither the event loop nor Ctrl-C waits for the next line of a pipe."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(1)

    def read() -> None:
        # Not `sys.stdin.buffer`: Python would wait for its lock at exit.
        with contextlib.suppress(RuntimeError), open(file.fileno(), "rb", closefd=False) as source:  # the loop ended
            for numbered in itertools.chain(enumerate(source, 1), [None]):
                asyncio.run_coroutine_threadsafe(lines.put(numbered), loop).result()

    threading.Thread(target=read, name="lines", daemon=True).start()
    while (numbered := await lines.get()) is not None:
        if numbered[1].strip():
            yield numbered[0], numbered[1].strip()
