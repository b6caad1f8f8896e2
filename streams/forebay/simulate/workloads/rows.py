"""Workload files with one request per line: Mooncake's format, its dialect with sessions, and forebay's format.

Theory of operation. A file without dependencies between rows is read as a stream. Otherwise the file is read twice. A
dependent request must be known before the response that it waits for. Therefore it is emitted right after the latest
row with a fixed time among its direct and indirect dependencies. The first pass finds the position of each row, and
takes about 130 bytes per row. The second pass emits the rows in that order.
"""

import mmap
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from forebay.runtime.errors import ConfigError
from forebay.simulate.workload import Turn
from forebay.simulate.workloads.source import (
    BLOCK_ID_MAX,
    NOT_JSON,
    OUTPUT_TOKENS_MAX,
    PROMPT_TOKENS_MAX,
    TIME_MS_MAX,
    US_PER_MS,
    BlockId,
    RowErrors,
    lines,
    require_readable,
)

BLOCK_TOKENS = 512  # of Mooncake's traces, which were published with its paper (FAST '25)
FORMAT = "forebay.workload"
VERSION = 1
BLOCK_TOKENS_MAX = 1 << 20
CHAT_ID = (b'"chat_id"',)  # in rows of Qwen's usage traces, whose timestamps are seconds
FIRST_MS_MAX = 1e9  # 11 days; a later first timestamp counts from 1970
CONVERT = (
    "expected whole milliseconds from the start of the trace; convert the timestamps and write the header of"
    " docs/workloads.md#traces-in-seconds before the first row"
)
LINKS = (b'"delay"', b'"after"', b'"session_id"', b'"id"')  # rows without these fields have no dependencies

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=TIME_MS_MAX)]
PromptTokens = Annotated[int, msgspec.Meta(ge=1, le=PROMPT_TOKENS_MAX)]
OutputTokens = Annotated[int, msgspec.Meta(ge=1, le=OUTPUT_TOKENS_MAX)]


class MooncakeRow(msgspec.Struct, frozen=True, gc=False):
    """One request of a Mooncake trace, with the field names of the trace."""

    timestamp: Milliseconds
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: list[BlockId]


class WorkloadHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a file in forebay's format."""

    format: str = FORMAT
    version: int = VERSION
    block_tokens: int  # tokens per id of `hash_ids`
    name: str = ""
    source: str = ""  # description of where the workload comes from, for readers of the file


class LinkedRow(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Row of a workload file: a request that may depend on other requests."""

    # Arrival time in ms. For a row that depends on responses, the earliest arrival time.
    timestamp: Milliseconds | None = None
    input_length: PromptTokens  # number of prompt tokens
    output_length: OutputTokens  # number of response tokens
    hash_ids: tuple[BlockId, ...] = ()
    # Name by which other rows refer to this row in `after`. They can also use its row number in the file, from 0.
    id: str = ""
    # Ids or numbers of the rows whose responses must be complete before this request arrives.
    after: tuple[int | str, ...] = ()
    # Ms from the last response of `after` to the arrival of this request. Without `after`, ms from the previous
    # response of the session.
    delay: Milliseconds | None = None
    session_id: str = ""  # id of the session of the request; empty if it has none
    model: str = ""  # name of the requested model; empty for the only model


class RowFile:
    """Workload source that reads a file with one request per line."""

    def __init__(self, path: Path, *, ours: bool) -> None:
        """Open the file. If it is in forebay's own format (`ours`), it begins with a header."""
        self._path = require_readable(path)
        self._header = _header(path) if ours else None
        self.name = (self._header and self._header.name) or path.name
        self.block_tokens = self._header.block_tokens if self._header else BLOCK_TOKENS
        self.notes: list[str] = []

    def turns(self, errors: RowErrors) -> Iterator[Turn]:
        """Yield the requests in the order of `Workload.turns`. Rows with a fixed time keep the order of the file."""
        errors.file, errors.unit = str(self._path), "line"
        if self._header is None and _mentions(self._path, CHAT_ID):
            raise ConfigError(f"{self._path}: rows with a chat_id have timestamps in seconds; {CONVERT}")
        if _mentions(self._path, LINKS):
            return self._linked(errors)
        return self._stream(errors)

    def _rows(self) -> Iterator[tuple[int, int, bytes]]:
        found = lines(self._path)
        if self._header:
            next(found)
        return found

    def _stream(self, errors: RowErrors) -> Iterator[Turn]:
        """Yield rows without dependencies."""
        kind: type[LinkedRow | MooncakeRow] = LinkedRow if self._header else MooncakeRow
        decode = msgspec.json.Decoder(kind).decode
        number = 0
        for errors.row, _, line in self._rows():
            try:
                row = decode(line)
            except NOT_JSON as error:
                errors.report(str(error))
                continue
            self._require_ms(row, errors.row, is_first=not number)
            if reason := self._misnamed(row.hash_ids, row.input_length) or _timeless(row):
                errors.report(reason)
                continue
            yield _turn(row, number, ())
            number += 1

    def _linked(self, errors: RowErrors) -> Iterator[Turn]:
        plan = _Plan()
        decode = msgspec.json.Decoder(LinkedRow).decode
        for errors.row, offset, line in self._rows():
            try:
                row = decode(line)
            except NOT_JSON as error:
                plan.skip()
                errors.report(str(error))
                continue
            self._require_ms(row, errors.row, is_first=not plan.line)
            if self._header is None and not row.hash_ids:
                reason = "Object missing required field `hash_ids`"
            else:
                reason = self._misnamed(row.hash_ids, row.input_length)
            reason = reason or plan.add(row, errors.row, offset)
            if reason:
                plan.skip()
                errors.report(reason)
        order = sorted(range(len(plan.group)), key=plan.group.__getitem__)
        number_of = array("q", bytes(8 * len(order)))
        try:
            with self._path.open("rb") as file:
                for number, at in enumerate(order):
                    number_of[at] = number
                    errors.row = plan.line[at]
                    if file.tell() != plan.offset[at]:
                        file.seek(plan.offset[at])
                    row = decode(file.readline())
                    if self._header is None and plan.after(at):
                        # A recorded timestamp includes the latency of responses, which the simulation replaces.
                        row = msgspec.structs.replace(row, timestamp=None)
                    yield _turn(row, number, tuple(number_of[one] for one in plan.after(at)))
        except (OSError, *NOT_JSON) as error:
            raise ConfigError(f"{self._path}: the file changed while it was read ({error})") from error

    def _require_ms(self, row: "LinkedRow | MooncakeRow", line: int | str, *, is_first: bool) -> None:
        """Raise ConfigError, also if bad rows are skipped, if the timestamps of Mooncake's format have another unit."""
        at = row.timestamp
        if self._header is not None or at is None:
            return
        if at % 1:
            reason = f"the timestamp {at:.15g} has a fraction, so it is in seconds"
        elif is_first and at > FIRST_MS_MAX:
            reason = f"the first timestamp {at:.15g} counts from 1970"
        else:
            return
        raise ConfigError(f"{self._path}, line {line}: {reason}; {CONVERT}")

    def _misnamed(self, ids: Sequence[int], tokens: int) -> str:
        """Return why a prompt of `tokens` tokens cannot have these block ids; empty if it can."""
        if len(ids) * self.block_tokens < tokens and (ids or self._header is None):
            return f"{len(ids)} hash ids cover fewer than {tokens} tokens"
        most = -(-tokens // self.block_tokens)
        if len(ids) > most:
            size = self.block_tokens
            return f"got {len(ids)} hash ids for {tokens} tokens; at most {most} of {size} tokens each are possible"
        if ids and max(ids) > BLOCK_ID_MAX:
            return f"the hash id {max(ids)} exceeds 64 bits"
        return ""


class _Plan:
    """Dependencies between rows, and the resulting order: line number and byte offset of each good row.

    `group` is the number of rows with a fixed time up to and including the row's latest dependency.
    """

    def __init__(self) -> None:
        self.line = array("q")
        self.offset = array("q")
        self.group = array("q")
        self._after_from = array("q", [0])  # end of each row's dependencies in `_after`
        self._after = array("q")
        self._own_times = 0
        self._good = array("q")  # index among the good rows by row number, or -1
        self._named: dict[str, int] = {}
        self._last: dict[str, int] = {}  # last row by session

    def skip(self) -> None:
        """Count a row that is skipped."""
        self._good.append(-1)

    def add(self, row: LinkedRow, line: int, offset: int) -> str:
        """Add a row. Return why it cannot be played; empty if it was added."""
        if row.id in self._named:
            return f"duplicate id {row.id!r}, first used on line {self.line[self._named[row.id]]}"
        at = len(self.line)
        after: list[int] = []
        for one in row.after:
            found = self._named.get(one, -1) if isinstance(one, str) else self._by_number(one)
            if found < 0:
                return f"`after` names {one!r}, which is not a valid earlier row"
            after.append(found)
        follows = not row.after and row.session_id in self._last and (row.timestamp is None or row.delay is not None)
        if follows:
            after.append(self._last[row.session_id])
        if not after:
            if reason := _timeless(row):
                return reason
            self._own_times += 1
        self.group.append(max((self.group[one] for one in after), default=self._own_times))
        self._after.extend(after)
        self._after_from.append(len(self._after))
        self._good.append(at)
        self.line.append(line)
        self.offset.append(offset)
        if row.id:
            self._named[row.id] = at
        if row.session_id:
            self._last[row.session_id] = at
        return ""

    def after(self, at: int) -> "array[int]":
        """Return the good rows that a good row depends on."""
        return self._after[self._after_from[at] : self._after_from[at + 1]]

    def _by_number(self, number: int) -> int:
        return self._good[number] if 0 <= number < len(self._good) else -1


def _timeless(row: LinkedRow | MooncakeRow) -> str:
    if row.timestamp is None:
        return "Object missing required field `timestamp`: it depends on no earlier row"
    if isinstance(row, LinkedRow) and row.delay:
        return f"got a delay of {row.delay} ms, but there is no earlier response that it could depend on"
    return ""


def _turn(row: LinkedRow | MooncakeRow, number: int, after: tuple[int, ...]) -> Turn:
    turn = Turn(
        number, row.input_length, row.output_length, tuple(row.hash_ids), round((row.timestamp or 0) * US_PER_MS)
    )
    if isinstance(row, MooncakeRow):
        return turn
    delay_us = round((row.delay or 0) * US_PER_MS)
    return msgspec.structs.replace(turn, after=after, delay_us=delay_us, session_id=row.session_id, model=row.model)


def _header(path: Path) -> WorkloadHeader:
    first = next(lines(path), None)
    if first is None:
        raise ConfigError(f"{path}: is empty")
    try:
        header = msgspec.json.decode(first[2], type=WorkloadHeader)
    except NOT_JSON as error:
        raise ConfigError(f"{path}, line 1: invalid workload header ({error})") from error
    if header.format != FORMAT or header.version != VERSION:
        text = f"got format {header.format!r}, version {header.version}; expected {FORMAT!r}, version {VERSION}"
        raise ConfigError(f"{path}, line 1: {text}")
    if not 1 <= header.block_tokens <= BLOCK_TOKENS_MAX:
        reason = f"got block_tokens {header.block_tokens}; must be 1 to {BLOCK_TOKENS_MAX}"
        raise ConfigError(f"{path}, line 1: {reason}")
    return header


def _mentions(path: Path, needles: tuple[bytes, ...]) -> bool:
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                return any(text.find(needle) >= 0 for needle in needles)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error


def encode_workload(turns: Iterable[Turn], header: WorkloadHeader) -> Iterator[bytes]:
    """Yield the lines of a workload file: the header, then one line per request. Errors of `turns` propagate."""
    encode = msgspec.json.Encoder().encode
    yield encode(header) + b"\n"
    for turn in turns:
        yield encode(_row(turn)) + b"\n"


def _row(turn: Turn) -> LinkedRow:
    return LinkedRow(
        timestamp=_ms(turn.at_us) if turn.at_us or not turn.after else None,
        input_length=turn.prompt_tokens,
        output_length=turn.output_tokens,
        hash_ids=turn.block_ids,
        after=turn.after,
        delay=_ms(turn.delay_us) if turn.delay_us else None,
        session_id=turn.session_id,
        model=turn.model,
    )


def _ms(us: int) -> float:
    """Return milliseconds, as an integer if possible. A float is precise: 100 years have fewer than 2**53 us."""
    return us // US_PER_MS if us % US_PER_MS == 0 else us / US_PER_MS
