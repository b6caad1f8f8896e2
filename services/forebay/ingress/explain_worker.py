"""Child process that reads the log for an ingress, so that re-deriving decisions does not block the ingress.

It explains requests, and derives the status of a group.

The process reads JSON lines from stdin: first the location of the log, then one request per line. It writes each
response to stdout as a length followed by that many bytes of JSON. It exits immediately when stdin ends, because then
the ingress is gone.
"""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import BinaryIO

import msgspec

from forebay.replay.explain.explain import UnknownRequest, explain
from forebay.replay.explain.explanation import Explanation
from forebay.replay.load_policies import PolicyUnusable, load_policies
from forebay.replay.policies import require_allowed
from forebay.replay.status import GroupStatus, read_status
from forebay.transport.base import Log, LogError, PolicyNotAllowed
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.sqlite.log import SqliteLog

NICENESS = 10  # routing and serving have priority
LENGTH_BYTES = 8


class LogSource(msgspec.Struct, frozen=True):
    """Location of the log: the file of an embedded log, or Kafka.

    Attributes:
        path: path of the log file; None for Kafka.
        kafka: settings of the connection to Kafka; None for a log file.
        policies: custom routing policies that may be imported, from the command line of the ingress.
    """

    path: str | None = None
    kafka: KafkaSettings | None = None
    policies: tuple[str, ...] = ()


class ExplainRequest(msgspec.Struct, frozen=True, tag="explain"):
    """Message to the child process: explain one request.

    Attributes:
        request_id: id of the request to explain.
        partition: partition of the control topics of the request's group.
    """

    request_id: str
    partition: int


class StatusRequest(msgspec.Struct, frozen=True, tag="status"):
    """Message to the child process: derive the status of a group.

    Attributes:
        group: name of the group.
        partition: partition of its control topics.
    """

    group: str
    partition: int


AnyRequest = ExplainRequest | StatusRequest


class ExplainResponse(msgspec.Struct, frozen=True):
    """Message from the child process: an explanation, the status of a group, or an error.

    Attributes:
        content: the explanation or status as JSON; unset for an error.
        status: HTTP status of the response to the client.
        code: error code; empty if there is content.
        message: error message; empty if there is content.
    """

    content: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    status: int = 200
    code: str = ""
    message: str = ""


def main() -> None:
    """Read `LogSource` from stdin, then respond to one message per line until stdin ends."""
    os.nice(NICENESS)
    # Output that a user's policy prints must not corrupt the responses.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    source = msgspec.json.decode(sys.stdin.buffer.readline(), type=LogSource)
    asyncio.run(_serve(source, output))


async def _serve(source: LogSource, output: BinaryIO) -> None:
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def listen() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        os._exit(0)

    threading.Thread(target=listen, name="stdin", daemon=True).start()
    while True:
        request = msgspec.json.decode(await lines.get(), type=AnyRequest)
        encoded = msgspec.json.encode(await _respond(source, request))
        output.write(len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded)
        output.flush()


async def _respond(source: LogSource, request: AnyRequest) -> ExplainResponse:
    try:
        async with _opened(source) as log:
            custom = load_policies(source.policies)
            await require_allowed(log, request.partition, custom)
            found: Explanation | GroupStatus
            if isinstance(request, StatusRequest):
                found = await read_status(log, request.partition, request.group, custom)
            else:
                found = await explain(log, request.partition, request.request_id, thorough=False, custom=custom)
    except UnknownRequest as unknown:
        return ExplainResponse(status=404, code="request_not_found", message=str(unknown))
    except (PolicyNotAllowed, PolicyUnusable) as unusable:
        return ExplainResponse(
            status=501, code="policy_not_here", message=f"{unusable}; restart the ingress with the option"
        )
    except LogError as error:
        return ExplainResponse(status=503, code="log_unavailable", message=str(error))
    return ExplainResponse(content=msgspec.Raw(msgspec.json.encode(found)))


@asynccontextmanager
async def _opened(source: LogSource) -> AsyncIterator[Log]:
    if source.kafka is not None:
        kafka = await KafkaLog.open(source.kafka)
        try:
            yield kafka
        finally:
            await kafka.close()
        return
    assert source.path is not None, "two processes share either Kafka or a file"
    with closing(SqliteLog.open(source.path, readonly=True)) as log:
        yield log


if __name__ == "__main__":
    main()
