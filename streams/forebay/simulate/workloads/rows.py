"""Files of one request a line: Mooncake's format, its dialect with sessions, and ours.

Theory of operation. A file in which no row follows on others is read as a stream. Otherwise it is read twice: what
follows on a request has to be known before the answer comes, so it is told right behind the last of the rows that it
waits for, or that those wait for, which comes at a time of its own. The first reading finds where each row belongs
(some 130 bytes a row), the second tells them in that order.
"""

import mmap
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from forebay.simulate.mooncake import BLOCK_TOKENS, Milliseconds, OutputTokens, PromptTokens, Row
from forebay.simulate.workload import Turn, WorkloadUnusable
from forebay.simulate.workloads.lines import lines
from forebay.simulate.workloads.source import BLOCK_ID_MAX, NOT_JSON, US_PER_MS, BlockId, Faults, opened, too_many_ids

FORMAT = "forebay.workload"
VERSION = 1
BLOCK_TOKENS_MAX = 1 << 20
LINKS = (b'"delay"', b'"after"', b'"session_id"', b'"id"')  # without these no row of a file follows on others


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file in our format.

    Attributes:
        block_tokens: tokens that one of `hash_ids` stands for.
        source: what it was made from, for people.
    """

    format: str = FORMAT
    version: int = VERSION
    block_tokens: int
    name: str = ""
    source: str = ""


class LinkedRow(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One request that may follow on others.

    Attributes:
        timestamp: ms; of a row that follows on others the earliest time.
        id: by which others name it in `after`. Its number in the file, from 0, does as well.
        after: the rows whose answers it waits for.
        delay: ms from the last of these answers. Without `after`, from the answer before it in its session.
    """

    timestamp: Milliseconds | None = None
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: tuple[BlockId, ...] = ()
    id: str = ""
    after: tuple[int | str, ...] = ()
    delay: Milliseconds | None = None
    session_id: str = ""
    model: str = ""


class RowFile:
    """A file of rows, as a source."""

    def __init__(self, path: Path, *, ours: bool) -> None:
        """`ours`: it begins with a header. Raises WorkloadUnusable."""
        self._path = opened(path)
        self._header = _header(path) if ours else None
        self.name = (self._header and self._header.name) or path.name
        self.block_tokens = self._header.block_tokens if self._header else BLOCK_TOKENS
        self.notes: list[str] = []

    def turns(self, faults: Faults) -> Iterator[Turn]:
        """Rows that come at a time of their own in the order of the file."""
        faults.file, faults.unit = str(self._path), "line"
        if _mentions(self._path, LINKS):
            return self._linked(faults)
        return self._stream(faults) if self._header else self._plain(faults)

    def _rows(self) -> Iterator[tuple[int, int, bytes]]:
        found = lines(self._path)
        if self._header:
            next(found)
        return found

    def _plain(self, faults: Faults) -> Iterator[Turn]:
        """Rows of the four fields that Mooncake's have."""
        decode = msgspec.json.Decoder(Row).decode
        number = 0
        for faults.row, _, line in self._rows():
            try:
                row = decode(line)
            except NOT_JSON as error:
                faults.bad(str(error))
                continue
            if reason := self._misnamed(row.hash_ids, row.input_length):
                faults.bad(reason)
                continue
            yield Turn(
                number=number,
                prompt_tokens=row.input_length,
                output_tokens=row.output_length,
                block_ids=tuple(row.hash_ids),
                at_us=round(row.timestamp * US_PER_MS),
            )
            number += 1

    def _stream(self, faults: Faults) -> Iterator[Turn]:
        """Rows of ours, none of which follows on others."""
        decode = msgspec.json.Decoder(LinkedRow).decode
        number = 0
        for faults.row, _, line in self._rows():
            try:
                row = decode(line)
            except NOT_JSON as error:
                faults.bad(str(error))
                continue
            if reason := self._misnamed(row.hash_ids, row.input_length) or _timeless(row):
                faults.bad(reason)
                continue
            yield _turn(row, number, ())
            number += 1

    def _linked(self, faults: Faults) -> Iterator[Turn]:
        plan = _Plan()
        decode = msgspec.json.Decoder(LinkedRow).decode
        for faults.row, offset, line in self._rows():
            try:
                row = decode(line)
            except NOT_JSON as error:
                plan.skip()
                faults.bad(str(error))
                continue
            if self._header is None and not row.hash_ids:
                reason = "Object missing required field `hash_ids`"
            else:
                reason = self._misnamed(row.hash_ids, row.input_length)
            reason = reason or plan.add(row, faults.row, offset)
            if reason:
                plan.skip()
                faults.bad(reason)
        order = sorted(range(len(plan.group)), key=plan.group.__getitem__)
        number_of = array("q", bytes(8 * len(order)))
        try:
            with self._path.open("rb") as file:
                for number, at in enumerate(order):
                    number_of[at] = number
                    faults.row = plan.line[at]
                    if file.tell() != plan.offset[at]:
                        file.seek(plan.offset[at])
                    row = decode(file.readline())
                    if self._header is None and plan.after(at):
                        row = msgspec.structs.replace(row, timestamp=None)  # of a recorded run, answers included
                    yield _turn(row, number, tuple(number_of[one] for one in plan.after(at)))
        except (OSError, *NOT_JSON) as error:
            raise WorkloadUnusable(f"{self._path}: was changed while it was read ({error})") from error

    def _misnamed(self, ids: Sequence[int], tokens: int) -> str:
        """Why a prompt of so many tokens cannot have these ids; empty if it can."""
        if len(ids) * self.block_tokens < tokens and (ids or self._header is None):
            return f"{len(ids)} hash ids do not cover {tokens} tokens"
        if reason := too_many_ids(len(ids), tokens, self.block_tokens):
            return reason
        if ids and max(ids) > BLOCK_ID_MAX:
            return f"the hash id {max(ids)} is beyond 64 bits"
        return ""


class _Plan:
    """Which rows follow on which, and so which come behind which.

    Attributes:
        line: of each good row, numbered from 0; `offset` is that of its bytes.
        group: how many rows with a time of their own come before it or are it.
    """

    def __init__(self) -> None:
        self.line = array("q")
        self.offset = array("q")
        self.group = array("q")
        self._after_from = array("q", [0])  # where each row's `after` ends in the array of all
        self._after = array("q")
        self._own_times = 0
        self._good = array("q")  # by number in the file: among the good, or -1
        self._named: dict[str, int] = {}
        self._last: dict[str, int] = {}  # of each session

    def skip(self) -> None:
        """A row is left out."""
        self._good.append(-1)

    def add(self, row: LinkedRow, line: int, offset: int) -> str:
        """A row; why it cannot be played, empty for added."""
        if row.id in self._named:
            return f"the id {row.id!r} is that of line {self.line[self._named[row.id]]}, too"
        at = len(self.line)
        after: list[int] = []
        for one in row.after:
            found = self._named.get(one, -1) if isinstance(one, str) else self._by_number(one)
            if found < 0:
                return f"comes after {one!r}, which is no row before it that can be played"
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
        """The good rows that a good row follows on."""
        return self._after[self._after_from[at] : self._after_from[at + 1]]

    def _by_number(self, number: int) -> int:
        return self._good[number] if 0 <= number < len(self._good) else -1


def _timeless(row: LinkedRow) -> str:
    if row.timestamp is None:
        return "Object missing required field `timestamp`: it follows on no row before it"
    if row.delay:
        return f"a delay of {row.delay} ms, and no answer before it that it could follow on"
    return ""


def _turn(row: LinkedRow, number: int, after: tuple[int, ...]) -> Turn:
    return Turn(
        number=number,
        prompt_tokens=row.input_length,
        output_tokens=row.output_length,
        block_ids=row.hash_ids,
        at_us=round((row.timestamp or 0) * US_PER_MS),
        after=after,
        delay_us=round((row.delay or 0) * US_PER_MS),
        session_id=row.session_id,
        model=row.model,
    )


def _header(path: Path) -> Header:
    first = next(lines(path), None)
    if first is None:
        raise WorkloadUnusable(f"{path}: is empty")
    try:
        header = msgspec.json.decode(first[2], type=Header)
    except NOT_JSON as error:
        raise WorkloadUnusable(f"{path}, line 1: is no header of a workload ({error})") from error
    if header.format != FORMAT or header.version != VERSION:
        text = f"{header.format!r} in version {header.version}; {FORMAT!r} in version {VERSION} can be read"
        raise WorkloadUnusable(f"{path}, line 1: {text}")
    if not 1 <= header.block_tokens <= BLOCK_TOKENS_MAX:
        raise WorkloadUnusable(f"{path}, line 1: block_tokens {header.block_tokens}: from 1 to {BLOCK_TOKENS_MAX}")
    return header


def _mentions(path: Path, needles: tuple[bytes, ...]) -> bool:
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                return any(text.find(needle) >= 0 for needle in needles)
    except (OSError, ValueError) as error:
        raise WorkloadUnusable(f"{path}: cannot be read ({error})") from error
