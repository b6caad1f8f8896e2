"""The process that explains requests for an ingress, so that deriving holds nobody up: questions in, answers out.

It reads JSON lines on stdin, first where the log is, then questions one by one, and answers each on stdout with a
length and as many bytes of JSON. It ends when stdin does, whatever it is at: then whoever asks is gone.
"""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import BinaryIO

import msgspec

from forebay.core.routing.policies import PolicyUnusable, policy_class
from forebay.replay.explain.explain import UnknownRequest, explain
from forebay.transport.base import Log, LogError
from forebay.transport.history.groups import pools_of
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.sqlite.log import SqliteLog

NICENESS = 10  # those who decide and serve come first
LENGTH_BYTES = 8


class LogSource(msgspec.Struct, frozen=True):
    """Where the log is: the file of an embedded one, or Kafka."""

    path: str | None = None
    kafka: KafkaSettings | None = None


class ExplainRequest(msgspec.Struct, frozen=True):
    """Which request of the group in which control partition."""

    request_id: str
    partition: int


class ExplainResponse(msgspec.Struct, frozen=True):
    """An explanation as JSON; or none, and what is wrong, as an HTTP status, a code and a message."""

    explanation: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    status: int = 200
    code: str = ""
    message: str = ""


def main() -> None:
    """Answer until stdin ends."""
    os.nice(NICENESS)
    # What a user's policy prints must not come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    source = msgspec.json.decode(sys.stdin.buffer.readline(), type=LogSource)
    asyncio.run(_answer_all(source, answers))


async def _answer_all(source: LogSource, answers: BinaryIO) -> None:
    questions: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def listen() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(questions.put_nowait, line)
        os._exit(0)

    threading.Thread(target=listen, name="stdin", daemon=True).start()
    while True:
        question = msgspec.json.decode(await questions.get(), type=ExplainRequest)
        encoded = msgspec.json.encode(await _answer(source, question))
        answers.write(len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded)
        answers.flush()


async def _answer(source: LogSource, question: ExplainRequest) -> ExplainResponse:
    try:
        async with _opened(source) as log:
            told = await explain(log, question.partition, question.request_id, thorough=False)
            if told.divergence is not None:  # which a policy that is not here looks like
                for pool in await pools_of(log, question.partition):
                    policy_class(pool.router.mode)
    except UnknownRequest as unknown:
        return ExplainResponse(status=404, code="request_not_found", message=str(unknown))
    except PolicyUnusable as unusable:
        return ExplainResponse(status=501, code="policy_not_here", message=f"{unusable}; start the ingress where it is")
    except LogError as error:
        return ExplainResponse(status=503, code="log_unavailable", message=str(error))
    return ExplainResponse(explanation=msgspec.Raw(msgspec.json.encode(told)))


@asynccontextmanager
async def _opened(source: LogSource) -> AsyncIterator[Log]:
    if source.kafka is not None:
        kafka = await KafkaLog.open(source.kafka)
        try:
            yield kafka
        finally:
            await kafka.close()
        return
    assert source.path is not None, "there is no other log that two processes share"
    log = SqliteLog.open(source.path, readonly=True)
    try:
        yield log
    finally:
        log.close()


if __name__ == "__main__":
    main()
