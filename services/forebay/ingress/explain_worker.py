"""Child process that explains requests and derives the status of a group, so that the ingress is not blocked.

`forebay.ingress.child_process` describes the messages. The first message is the location of the log.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import msgspec

from forebay.ingress.child_process import ChildConnection, ChildResponse
from forebay.journal.groups import partitions_of
from forebay.replay.explain.explain import explain_among
from forebay.replay.explain.explanation import Explanation
from forebay.replay.explain.find import UnknownRequest
from forebay.replay.policies import load_policies, require_allowed
from forebay.replay.status import GroupStatus, read_status
from forebay.runtime.errors import ConfigError
from forebay.transport.base import Log, LogError, NotDerivable, PolicyNotAllowed
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.sqlite.log import SqliteLog


class LogSource(msgspec.Struct, frozen=True):
    """Location of the log: a file, or Kafka. `policies` are the custom routing policies that may be imported."""

    path: str | None = None
    kafka: KafkaSettings | None = None
    policies: tuple[str, ...] = ()


class ExplainRequest(msgspec.Struct, frozen=True, tag="explain"):
    """Message to explain a request; `partition` is that of the control topics of its group, None to search all."""

    request_id: str
    partition: int | None


class StatusRequest(msgspec.Struct, frozen=True, tag="status"):
    group: str
    partition: int


AnyRequest = ExplainRequest | StatusRequest


def main() -> None:
    asyncio.run(_serve(ChildConnection()))


async def _serve(connection: ChildConnection) -> None:
    source = msgspec.json.decode(connection.setup, type=LogSource)
    async for message in connection.messages():
        response = await _respond(source, msgspec.json.decode(message, type=AnyRequest))
        connection.send(msgspec.json.encode(response))


async def _respond(source: LogSource, request: AnyRequest) -> ChildResponse:
    try:
        async with opened_log(source) as log:
            custom = load_policies(source.policies)
            found: Explanation | GroupStatus
            if isinstance(request, StatusRequest):
                await require_allowed(log, request.partition, custom)
                found = await read_status(log, request.partition, request.group, custom)
            else:
                partitions = await partitions_of(log) if request.partition is None else {request.partition}
                found = await explain_among(log, partitions, request.request_id, thorough=False, custom=custom)
    except UnknownRequest as unknown:
        return ChildResponse(status=404, code="request_not_found", message=str(unknown))
    except (PolicyNotAllowed, ConfigError) as unusable:
        return ChildResponse(
            status=501, code="policy_not_here", message=f"{unusable}; restart the ingress with the option"
        )
    except NotDerivable as error:
        return ChildResponse(status=409, code="other_rules", message=str(error))
    except LogError as error:
        return ChildResponse(status=503, code="log_unavailable", message=str(error))
    return ChildResponse(content=msgspec.Raw(msgspec.json.encode(found)))


@asynccontextmanager
async def opened_log(source: LogSource) -> AsyncIterator[Log]:
    """Open a log read-only, and close it after the body. Raises LogError if it cannot be read."""
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
