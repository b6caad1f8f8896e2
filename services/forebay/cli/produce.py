"""`forebay produce`: send request bodies from a file to the Kafka API, and print the responses."""

import asyncio
import contextlib
import os
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import typer
import uvloop
from aiokafka import AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from forebay.cli.common.cluster_options import KafkaOptions
from forebay.cli.common.errors import complain, explained
from forebay.cli.common.failures import FailureCounts, status_failure
from forebay.cli.common.logs import LoggingOptions, LogLevel
from forebay.cli.common.terminal import bar
from forebay.events.topics import OPENAI_REQUESTS, OPENAI_RESPONSES
from forebay.ingress.errors import Unusable
from forebay.ingress.kafka_api.request import CHAT_PATH, TEXT_PATH
from forebay.ingress.openai.requests import REQUEST_ID
from forebay.transport.base import LogError
from forebay.transport.kafka.consumer import DenseConsumer
from forebay.transport.kafka.errors import explain
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.start import start_whole
from forebay.transport.kafka.tail import headers_of
from forebay.transport.kafka.topics import count_topics
from forebay.transport.kafka.writer import RECORD_BYTES_MAX

LINGER_MS = 5  # lines of a file are sent in batches
FILE_LINES = 500  # lines read at once; a pipe or a terminal is read line by line
ERROR_STATUS = 400
INTERRUPTED = 130  # exit code after Ctrl-C, as of a shell
Show = Callable[["ProduceRun"], None]


class LineUnusable(Unusable):
    """A line of the file cannot be sent. The message names the line number."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One line of the file as a record on the request topic of the Kafka API."""

    request_id: str
    path: str
    body: bytes


@dataclass(slots=True)
class ProduceRun:
    """State of one `forebay produce`: requests sent, responses received, and errors by kind."""

    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    ids: set[str] = field(default_factory=set)
    pieces: dict[str, list[bytes]] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    failures: FailureCounts = field(default_factory=FailureCounts)
    trouble: KafkaError | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def errors(self) -> int:
        """Number of responses with an error."""
        return sum(self.failures.counts.values())

    def encode_request(self, number: int, line: bytes) -> RequestRecord:
        """Return the request record for line `number` of the file, counted from 1.

        Raises:
            LineUnusable: the `request_id` in the line is invalid or duplicate.
        """
        request_id, path, body = f"{self.run_id}-{number}", CHAT_PATH, line
        try:
            content: Any = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            content = None  # the ingress reports what is wrong with it
        if isinstance(content, dict):
            path = TEXT_PATH if "prompt" in content else CHAT_PATH
            if "request_id" in content:
                request_id = content.pop("request_id")
                body = msgspec.json.encode(content)
        if not isinstance(request_id, str) or not REQUEST_ID.fullmatch(request_id):
            reason = f"invalid request_id {request_id!r}; use 1 to 128 letters, digits, dots, dashes or underscores"
            raise LineUnusable(f"line {number}: {reason}")
        if request_id in self.ids:
            raise LineUnusable(f"line {number}: duplicate request_id {request_id!r}")
        self.ids.add(request_id)
        self.waiting.add(request_id)
        return RequestRecord(request_id, path, body)

    def add_record(self, request_id: str, headers: dict[str, str], value: bytes) -> dict[str, Any] | None:
        """Add a record of a response; drop repeated records. Return the whole response if this was its last record."""
        if request_id not in self.waiting:
            return None
        pieces = self.pieces.setdefault(request_id, [])
        if headers.get("index") != str(len(pieces)):
            return None
        pieces.append(value)
        if headers.get("last") != "1":
            return None
        self.waiting.discard(request_id)
        status = int(headers["status"])
        if status >= ERROR_STATUS:
            self.failures.add(status_failure(status, pieces[-1]))
        bodies = [msgspec.Raw(piece) for piece in self.pieces.pop(request_id)]
        payload = {"body": bodies[0]} if len(bodies) == 1 else {"chunks": bodies}
        return {"request_id": request_id, "status": status, **payload}


def run_produce(*, file: str, kafka: KafkaOptions, wait: bool, timeout_s: float) -> None:
    """Run `forebay produce`. produce_command.py documents its options."""
    LoggingOptions(log_level=LogLevel.WARNING).start()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    run = ProduceRun()
    with explained(), _opened(file) as source, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        settings = kafka.settings()
        try:
            with bar(*columns) as progress:
                task = progress.add_task("connecting")

                def show(run: ProduceRun) -> None:
                    progress.update(task, description=_progress_text(run, wait=wait))

                runner.run(_produce(source, settings, run, show, wait_s=timeout_s if wait else None))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        finally:  # also if Kafka fails or the command is interrupted
            for line in summary_lines(run, wait=wait) if run.ids else ():
                complain(line)
    if wait and (run.errors or run.waiting):
        raise typer.Exit(1)


async def _produce(
    source: BinaryIO, settings: KafkaSettings, run: ProduceRun, show: Show, *, wait_s: float | None
) -> None:
    """Send every line. If `wait_s` is not None, wait that many seconds for the responses.

    Raises:
        LogError: Kafka failed.
        LineUnusable: a line cannot be sent.
    """
    await count_topics(settings)
    try:
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(_producer(settings))
            if wait_s is not None:
                partitions = await producer.partitions_for(settings.topic(OPENAI_RESPONSES.name))
                await stack.enter_async_context(_collecting(settings, partitions, run, show))
            await _send(source, producer, settings.topic(OPENAI_REQUESTS.name), run, show)
            if wait_s is not None:
                await _wait(run, wait_s)
    except (KafkaError, OSError) as error:
        raise LogError(f"Kafka at {settings.bootstrap} failed: {explain(error)}") from error


async def _wait(run: ProduceRun, wait_s: float) -> None:
    with contextlib.suppress(TimeoutError):  # the command then reports the missing responses
        async with asyncio.timeout(wait_s):
            while run.waiting and run.trouble is None:
                run.answered.clear()
                await run.answered.wait()
    if run.trouble is not None:
        raise run.trouble


@asynccontextmanager
async def _producer(settings: KafkaSettings) -> AsyncIterator[AIOKafkaProducer]:
    producer = AIOKafkaProducer(
        **settings.client_options(),
        acks="all",
        enable_idempotence=True,
        linger_ms=LINGER_MS,
        compression_type="snappy",
        max_request_size=RECORD_BYTES_MAX,
    )
    await start_whole(producer.start, producer.stop)
    try:
        yield producer
    finally:
        await producer.stop()


async def _send(source: BinaryIO, producer: AIOKafkaProducer, topic: str, run: ProduceRun, show: Show) -> None:
    failed: list[BaseException] = []

    def done(future: "asyncio.Future[Any]") -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            failed.append(error)

    async for number, line in _lines(source):
        record = run.encode_request(number, line)
        headers = [("request-id", record.request_id.encode()), ("path", record.path.encode())]
        sent = await producer.send(topic, record.body, record.request_id.encode(), headers=headers)
        sent.add_done_callback(done)
        show(run)
        if failed:
            raise failed[0]
    await producer.flush()
    if failed:
        raise failed[0]


@asynccontextmanager
async def _collecting(
    settings: KafkaSettings, partitions: Collection[int], run: ProduceRun, show: Show
) -> AsyncIterator[None]:
    """Read responses from the current end of their topic on."""
    consumer = DenseConsumer(**settings.client_options(), enable_auto_commit=False)
    await start_whole(consumer.start, consumer.stop)
    try:
        places = [TopicPartition(settings.topic(OPENAI_RESPONSES.name), number) for number in sorted(partitions)]
        consumer.assign(places)
        for place, end in (await consumer.end_offsets(places)).items():
            consumer.seek(place, end)
        collecting = asyncio.create_task(_collect(consumer, run, show))
        try:
            yield
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
    finally:
        await consumer.stop()


async def _collect(consumer: DenseConsumer, run: ProduceRun, show: Show) -> None:
    try:
        async for message in consumer:
            _handle_record(message, run)
            show(run)
    except KafkaError as error:
        run.trouble = error
        run.answered.set()


def _handle_record(message: ConsumerRecord, run: ProduceRun) -> None:
    headers = headers_of(message.headers) or {}
    answer = run.add_record(headers.get("request-id", ""), headers, message.value or b"")
    if answer is None:
        return
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()
    if not run.waiting:
        run.answered.set()


async def _lines(source: BinaryIO) -> AsyncIterator[tuple[int, bytes]]:
    """Yield numbered lines that are not blank.

    A daemon thread reads them, because neither the event loop nor Ctrl-C should wait for the next line of a pipe.
    """
    loop = asyncio.get_running_loop()
    batches: asyncio.Queue[list[tuple[int, bytes]]] = asyncio.Queue(1)
    at_once = FILE_LINES if source.seekable() else 1

    def read() -> None:
        numbered = enumerate(source, 1)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            while batch := list(islice(numbered, at_once)):
                asyncio.run_coroutine_threadsafe(batches.put(batch), loop).result()
            asyncio.run_coroutine_threadsafe(batches.put([]), loop).result()

    threading.Thread(target=read, name="lines", daemon=True).start()
    while batch := await batches.get():
        for number, line in batch:
            if text := line.strip():
                yield number, text


@contextlib.contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    """Open the file. Standard input is not closed, because closing it would wait for the thread that reads it."""
    if file == "-":
        # Not `sys.stdin.buffer`: Python would wait for its lock at exit.
        yield os.fdopen(sys.stdin.fileno(), "rb", closefd=False)
        return
    try:
        source = Path(file).open("rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise Unusable(f"{file} cannot be read ({error.strerror})") from error
    with source:
        yield source


def summary_lines(run: ProduceRun, *, wait: bool) -> Iterator[str]:
    """Yield how many requests were sent and answered, and the errors by kind with an example."""
    yield _progress_text(run, wait=wait)
    for kind, count in run.failures.counts.items():
        yield f"failed {count}x: {kind}: {run.failures.examples[kind]}"


def _progress_text(run: ProduceRun, *, wait: bool) -> str:
    sent = f"{len(run.ids)} requests sent"
    if not wait:
        return sent
    answered = len(run.ids) - len(run.waiting)
    return f"{sent}, {answered} answered, {run.errors} of them with an error, {len(run.waiting)} missing"
