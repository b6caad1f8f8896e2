"""Process of a what-if comparison of the console: the code of `forebay replay diff` on a span of the log.

`forebay.ingress.child_process` describes the messages. The first message has the settings of the console, the second
one the comparison. The process responds with frames of progress, and with a last frame that has the report or an error.
"""

import asyncio

import click
import msgspec

from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.policies.alternative import AlternativeOptions
from forebay.cli.replay.diff import compared
from forebay.console.jobs import WhatIf, WhatIfFrame
from forebay.console.settings import ConsoleSettings
from forebay.ingress.child_process import ChildConnection
from forebay.ingress.explain_worker import opened_log
from forebay.journal.records import SpanEnds
from forebay.replay.diff.diff import span_of
from forebay.replay.diff.report import DiffReport
from forebay.runtime.errors import ConfigError
from forebay.transport.base import LogError


def main() -> None:
    """Compare once, and then wait for the end of the console, which kills this process."""
    asyncio.run(_serve(ChildConnection()))


async def _serve(connection: ChildConnection) -> None:
    settings = msgspec.json.decode(connection.setup, type=ConsoleSettings)
    async for message in connection.messages():
        wanted = msgspec.json.decode(message, type=WhatIf)
        try:
            report = await _compare(settings, wanted, connection)
            frame = WhatIfFrame(report=msgspec.Raw(msgspec.json.encode(report)))
        except SpanEnds as error:
            frame = WhatIfFrame(error=f"{error}. To compare only a part of the log, choose a span")
        except (LogError, ConfigError) as error:
            frame = WhatIfFrame(error=str(error))
        except click.exceptions.Exit:
            frame = WhatIfFrame(error="the comparison failed; the console's log has the reason")
        connection.send(msgspec.json.encode(frame))


async def _compare(settings: ConsoleSettings, wanted: WhatIf, connection: ChildConnection) -> DiffReport:
    other = AlternativeOptions(sets=list(wanted.sets), policy=wanted.policy or None).alternative()
    custom = allowed_policies(settings.source.policies, other.modes)
    async with opened_log(settings.source) as log:
        span = await span_of(log, settings.partition, wanted.from_us, wanted.to_us, custom=custom)

        def on_progress(done: int, _end: int, _: int) -> None:
            frame = WhatIfFrame(done=max(0, done - span.start.offset), total=span.end - span.start.offset)
            connection.send(msgspec.json.encode(frame))

        return await compared(other, log, settings.partition, span, on_progress)


if __name__ == "__main__":
    main()
