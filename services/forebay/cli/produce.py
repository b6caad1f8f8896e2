"""`forebay produce`: send request bodies from a file to the Kafka API, and print the responses."""

import asyncio
import contextlib
import itertools
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import IO, Any

import click
import msgspec
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from forebay.cli.command import ProduceCommand
from forebay.cli.common.errors import complain, explained, fail
from forebay.events.topics import OPENAI_REQUESTS, OPENAI_RESPONSES
from forebay.ingress.openai.requests import CHAT_PATH, REQUEST_ID, TEXT_PATH
from forebay.transport.base import LogError
from forebay.transport.kafka.consumer import DenseConsumer
from forebay.transport.kafka.errors import explain
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.start import start_whole
from forebay.transport.kafka.tail import headers_of
from forebay.transport.kafka.topics import count_topics
from forebay.transport.kafka.writer import RECORD_BYTES_MAX

ERROR_STATUS = 400


@dataclass(slots=True)
class ProduceRun:
    """Requests sent, records received per response, and number of responses with an error."""

    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    pieces: dict[str, list[msgspec.Raw]] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    errors: int = 0

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
    run, wait_s = ProduceRun(), options.timeout_s if options.wait else None
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


async def _produce(file: IO[bytes], settings: KafkaSettings, run: ProduceRun, wait_s: float | None) -> None:
    """Send every line. If `wait_s` is not None, wait that many seconds after the last line for the responses."""
    await count_topics(settings)
    consumer = DenseConsumer(**settings.client_options(), enable_auto_commit=False)
    producer = AIOKafkaProducer(
        **settings.client_options(), acks="all", enable_idempotence=True, max_request_size=RECORD_BYTES_MAX
    )
    try:
        async with contextlib.AsyncExitStack() as stack:
            for client in (producer,) if wait_s is None else (producer, consumer):
                await start_whole(client.start, client.stop)
                stack.push_async_callback(client.stop)
            is_sent = asyncio.Event()
            if wait_s is not None:
                topic = settings.topic(OPENAI_RESPONSES.name)
                places = [TopicPartition(topic, number) for number in await producer.partitions_for(topic)]
                consumer.assign(places)
                await consumer.seek_to_end(*places)
                collecting = asyncio.create_task(_collect(consumer, run, is_sent))
                stack.callback(collecting.cancel)
            await _send(file, producer, settings.topic(OPENAI_REQUESTS.name), run)
            is_sent.set()
            if wait_s is not None and run.waiting:
                await asyncio.wait([collecting], timeout=wait_s)
                if collecting.done():
                    collecting.result()
    except (KafkaError, OSError) as error:
        raise LogError(f"Kafka at {settings.bootstrap} failed: {explain(error)}") from error


async def _send(file: IO[bytes], producer: AIOKafkaProducer, topic: str, run: ProduceRun) -> None:
    """Send every line. Raises KafkaError as soon as a request could not be delivered."""
    unconfirmed: deque[asyncio.Future[Any]] = deque()
    async for number, line in _lines(file):
        request_id, path, body = run.encode_request(number, line)
        headers = [("request-id", request_id.encode()), ("path", path.encode())]
        unconfirmed.append(await producer.send(topic, body, request_id.encode(), headers=headers))
        while unconfirmed and unconfirmed[0].done():
            unconfirmed.popleft().result()
    await producer.flush()
    for confirmation in unconfirmed:
        await confirmation


async def _collect(consumer: DenseConsumer, run: ProduceRun, is_sent: asyncio.Event) -> None:
    """Print complete responses, until the last one after the last request was sent."""
    async for message in consumer:
        answer = run.add_record(headers_of(message.headers) or {}, message.value or b"")
        if answer is not None:
            click.echo(msgspec.json.encode(answer))
        if is_sent.is_set() and not run.waiting:
            return


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
