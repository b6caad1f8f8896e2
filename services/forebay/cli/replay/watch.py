"""`forebay replay at --watch`: a recorded group step by step, on a terminal by keys, elsewhere as lines."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import typer
from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from forebay.cli.common.terminal import printable
from forebay.cli.replay.at_view import (
    drawn,
    facts_sheet,
    lost_sheet,
    queue_sheet,
    ranks_sheet,
    requests_sheet,
    span,
    summary,
)
from forebay.cli.replay.watch_keys import HELP, Command, Typed, keys_of
from forebay.core.step import CLOCK, InputEvent
from forebay.events.base import U64_BYTES
from forebay.events.kv import BlocksRemoved, BlocksStored
from forebay.events.topics import KV_EVENTS
from forebay.replay.at import Diverged, Position, arrive, offset_at
from forebay.replay.explain.event_text import tag_of, text_of
from forebay.replay.moment import Moment
from forebay.replay.walk import Step
from forebay.transport.base import Log, LogError
from forebay.transport.recording.manifest import utc

LOOK_EVERY = 256  # steps between two looks for a key
WIDE_COLUMNS = 160  # from here on the record has its place beside the state, else below it
STATE_SHARE = 60  # percent of a wide screen
RECORD_LINES = 12
POOLS_LINES = 24  # below, the state is shown without the configuration of its pools
KV_EVENTS_TOLD_MAX = 3  # one by one, of one run
TABLE_LINES = 3  # of a table beside its rows: its name, its columns, what is left out


class Watch:
    """Where somebody looks, and what is to be said of how they came there."""

    def __init__(self, log: Log, partition: int, position: Position, interrupted: Callable[[], bool]) -> None:
        self.position = position
        self.note = ""
        self._log = log
        self._partition = partition
        self._interrupted = interrupted

    async def do(self, command: Command) -> None:
        """Go where a command says; `note` says what became of it if that is something else."""
        here = self.position.offset
        self.note = ""
        try:
            match command.kind:
                case "forward":
                    await self._forward(command.count)
                case "back":
                    self.position = await arrive(self._log, self._partition, max(0, here - command.count))
                case "time":
                    await self._by_time(command.count)
                case "find":
                    await self._find(command.text)
                case _:
                    self.note = command.text
        except Diverged as diverged:
            self.position = await arrive(self._log, self._partition, here)
            self.note = str(diverged)
        except LogError as error:
            self.note = str(error)

    async def _forward(self, count: int) -> None:
        left = iter(range(count - 1, -1, -1))
        if not await self._advance(lambda _: next(left) == 0):
            # The log may be written meanwhile: what is there now is another walk.
            self.position = await arrive(self._log, self._partition, self.position.offset)
            if await self.position.forward() is None:
                self.note = "this is the last record"

    async def _by_time(self, us: int) -> None:
        here = self.position.offset
        wanted = await offset_at(self._log, self._partition, self.position.world.now_us + us)
        if wanted == here:
            self.note = f"nothing was journalled in the next {span(us)}"
        else:
            await self._advance(lambda step: step.offset >= wanted)

    async def _find(self, request_id: str) -> None:
        here = self.position.offset
        if not await self._advance(lambda step: is_about(step, request_id)):
            self.position = await arrive(self._log, self._partition, here)
            self.note = f"no record after {here} is about {request_id}"

    async def _advance(self, arrived: Callable[[Step], bool]) -> bool:
        """Apply records until one is what was wanted, or a key is pressed; False if none came before the end."""
        steps = 0
        while (step := await self.position.forward()) is not None:
            steps += 1
            if arrived(step):
                return True
            if steps % LOOK_EVERY == 0:
                await asyncio.sleep(0)
                if self._interrupted():
                    self.note = f"stopped after {steps} records"
                    return True
        return False


def is_about(step: Step, request_id: str) -> bool:
    """Whether a record, or an event that it consumed, is about a request."""
    if getattr(step.record, "request_id", "") == request_id:
        return True
    events = (event for topic in step.events.values() for event in topic)
    return any(getattr(event, "request_id", "") == request_id for event in events)


async def watch(log: Log, partition: int, position: Position) -> None:
    """Step on from `position`: as keys say on a terminal, else to the end, a line for each record. Raises LogError."""
    console = Console()
    if not (sys.stdin.isatty() and console.is_terminal):
        while position.step is not None:
            typer.echo(_line(position, position.step))
            if await position.forward() is None:
                return
        return
    with keys_of(sys.stdin.fileno()) as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        typed, seen = Typed(), Watch(log, partition, position, lambda: not keys.empty())
        moment = before = await position.moment()
        while True:
            live.update(_screen(console, seen, moment, before, typed.line), refresh=True)
            command = typed.take(await keys.get())
            if command is None:
                continue
            if command.kind == "quit":
                return
            live.update(_screen(console, seen, moment, before, f"{command.kind}: any key stops"), refresh=True)
            await seen.do(command)
            before, moment = moment, await seen.position.moment()


def _line(position: Position, step: Step) -> str:
    applied = ", ".join(f"{topic} {len(events)}" for topic, events in step.events.items())
    clock = utc(position.world.now_us) if position.world.now_us else "-"
    return f"{step.offset} {clock} {summary(step.record)} <- {applied or 'nothing'}"


def _screen(console: Console, seen: Watch, moment: Moment, before: Moment, typed: str) -> Layout:
    width, height = console.size
    wide = width >= WIDE_COLUMNS
    lines = height - 2
    state_lines = lines if wide else lines - min(RECORD_LINES, lines // 3)
    state_width = width * STATE_SHARE // 100 if wide else width
    state = Layout(_state(console, state_width, state_lines, moment, before), name="state")
    record = Layout(
        Panel(_record(seen.position, lines - 2 if wide else lines - state_lines - 2), title="this record"),
        name="record",
    )
    body = Layout(name="body")
    if wide:
        state.size = state_width
        body.split_row(state, record)
    else:
        state.size = state_lines
        body.split_column(state, record)
    foot = Layout(_foot(seen, typed), name="foot", size=2)
    screen = Layout()
    screen.split_column(body, foot)
    return screen


def _state(console: Console, width: int, lines: int, moment: Moment, before: Moment) -> RenderableType:
    """What fits: of what the first lines leave the ranks get two thirds, the queue half of the rest."""

    def left() -> int:
        return lines - _height(console, width, Group(*parts))

    gone = [loss for loss in moment.lost if loss not in before.lost]
    parts: list[RenderableType] = [drawn(facts_sheet(moment, pools=lines >= POOLS_LINES), facts_sheet(before))]
    parts += [drawn(lost_sheet(loss, max(1, left() // 4))) for loss in gone[-1:]]
    ranks = max(1, min(len(moment.ranks), left() * 2 // 3 - TABLE_LINES))
    parts.append(drawn(ranks_sheet(moment, ranks), ranks_sheet(before, len(before.ranks))))
    waiting = sum(len(kind.waiting) for kind in (*moment.queues, *before.queues))
    queued = max(0, min(waiting, left() // 2 - TABLE_LINES))
    parts.append(drawn(queue_sheet(moment, queued), queue_sheet(before, waiting)))
    before_requests = requests_sheet(before, len(before.requests))
    rows, room = left() - TABLE_LINES, left()
    while rows > 0:
        requests = drawn(requests_sheet(moment, rows), before_requests)
        if _height(console, width, requests) <= room:
            return Group(*parts, requests)
        rows -= 1 + rows // 8  # long ids take two lines
    return Group(*parts)


def _height(console: Console, width: int, part: RenderableType) -> int:
    return len(console.render_lines(part, console.options.update(width=width, height=None)))


def _record(position: Position, lines: int) -> RenderableType:
    if position.step is None:
        return Text("nothing was applied yet")
    shown = [Text(summary(position.step.record), style="bold")]
    applied = list(_applied(position.step))
    room = max(1, lines - 3)  # the record itself may take two lines
    shown += [Text(printable(line), no_wrap=True, overflow="ellipsis") for line in applied[:room]]
    if len(applied) > room:
        shown.append(Text(f"and {len(applied) - room} more", style="dim"))
    return Group(*shown)


def _applied(step: Step) -> Iterator[str]:
    """The events that a record consumed, in the order in which they were applied, each with the clock's advance."""
    cursors: dict[str, int] = {}
    first_us = step.record.consumed[0].now_us if step.record.consumed else 0
    for run in step.record.consumed:
        since = f"+{span(run.now_us - first_us)}"
        if run.topic == CLOCK:
            yield f"{since} time passed"
            continue
        at = cursors.get(run.topic, 0)
        cursors[run.topic] = at + run.count
        events = step.events[run.topic][at : at + run.count]
        if run.topic == KV_EVENTS.name and run.count > KV_EVENTS_TOLD_MAX:
            yield f"{since} {run.count} kv events: {_caches(events)}"
            continue
        for event in events:
            yield f"{since} {tag_of(event)} {text_of(event)}"


def _caches(events: Sequence[InputEvent | None]) -> str:
    """What many KV events do to each cache: they come by the hundred, and would hide the rest."""
    stored, removed, others = Counter[str](), Counter[str](), Counter[str]()
    for event in events:
        match event:
            case BlocksStored():
                stored[f"{event.worker_id}/{event.rank}"] += len(event.sequence_hashes) // U64_BYTES
            case BlocksRemoved():
                removed[f"{event.worker_id}/{event.rank}"] += len(event.sequence_hashes) // U64_BYTES
            case _:
                others[tag_of(event)] += 1
    parts = [f"{rank} +{stored[rank]} -{removed[rank]} blocks" for rank in sorted({*stored, *removed})]
    return ", ".join([*parts, *(f"{count} {text}" for text, count in others.items())])


def _foot(seen: Watch, typed: str) -> RenderableType:
    said = (
        Text(f"> {typed}") if typed else Text(printable(seen.note) or f"record {seen.position.offset}", style="reverse")
    )
    return Group(said, Text(HELP, style="dim", no_wrap=True, overflow="ellipsis"))
