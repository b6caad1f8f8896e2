"""Child process that explains requests for an ingress, so that re-deriving decisions does not block the ingress.

The process reads JSON lines from stdin: first the location of the log, then one request per line. It writes each
response to stdout as a length followed by that many bytes of JSON. It exits immediately when stdin ends, because then
the ingress is gone.
"""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import BinaryIO

import msgspec

from forebay.replay.explain.explain import UnknownRequest, explain
from forebay.replay.policies import PolicyUnusable, load_policies, require_allowed
from forebay.transport.base import Log, LogError, PolicyNotAllowed
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.sqlite.log import SqliteLog

NICENESS = 10  # routing and serving have priority
LENGTH_BYTES = 8


class LogSource(msgspec.Struct, frozen=True):
    """Location of the log: the file of an embedded log, or Kafka.

    Attributes:
        path: file of the log; None for Kafka.
        kafka: how to connect to Kafka; None for a file.
        policies: custom policies that the ingress's operator allowed.
    """

    path: str | None = None
    kafka: KafkaSettings | None = None
    policies: tuple[str, ...] = ()


class ExplainRequest(msgspec.Struct, frozen=True):
    """Request for an explanation.

    Attributes:
        request_id: the request to explain.
        partition: control partition of its group.
    """

    request_id: str
    partition: int


class ExplainResponse(msgspec.Struct, frozen=True):
    """An explanation or an error.

    Attributes:
        explanation: JSON of the explanation, unset for an error.
        status: HTTP status.
        code: error code, empty for no error.
        message: error message, empty for no error.
    """

    explanation: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    status: int = 200
    code: str = ""
    message: str = ""


def main() -> None:
    """Serve requests until stdin ends."""
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
        request = msgspec.json.decode(await lines.get(), type=ExplainRequest)
        encoded = msgspec.json.encode(await _explain(source, request))
        output.write(len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded)
        output.flush()


async def _explain(source: LogSource, request: ExplainRequest) -> ExplainResponse:
    try:
        async with _opened(source) as log:
            custom = load_policies(source.policies)
            await require_allowed(log, request.partition, custom)
            explanation = await explain(log, request.partition, request.request_id, thorough=False, custom=custom)
    except UnknownRequest as unknown:
        return ExplainResponse(status=404, code="request_not_found", message=str(unknown))
    except (PolicyNotAllowed, PolicyUnusable) as unusable:
        return ExplainResponse(
            status=501, code="policy_not_here", message=f"{unusable}; restart the ingress with the option"
        )
    except LogError as error:
        return ExplainResponse(status=503, code="log_unavailable", message=str(error))
    return ExplainResponse(explanation=msgspec.Raw(msgspec.json.encode(explanation)))


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
    log = SqliteLog.open(source.path, readonly=True)
    try:
        yield log
    finally:
        log.close()


if __name__ == "__main__":
    main()
