"""LMCache's agent traces: unordered JSON lines of timestamp (us), input, output (text) and session_id.

Each row is a call of a model. A call arrives at its recorded time, but not before the response to the previous call of
its session. Text is tokenized by a tokenizer, or counted as four characters per token. The id of a block is a hash of
the text up to the end of the block, so equal prefixes have equal ids in all sessions. Source:
github.com/LMCache/lmcache-agent-trace.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.events.base import U32_BYTES, pack_u32
from forebay.simulate.workload import Turn, WorkloadUnusable
from forebay.simulate.workloads.lines import lines
from forebay.simulate.workloads.source import (
    NOT_JSON,
    TIME_MS_MAX,
    US_PER_MS,
    PositionedTurns,
    RowErrors,
    invalid_lengths,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BLOCK_TOKENS = 64
TOKEN_CHARACTERS = 4
ID_BITS_CUT = 11  # leaves 53 bits, because other JSON readers round larger integers


class _Call(msgspec.Struct, frozen=True):
    timestamp: Annotated[int, msgspec.Meta(ge=0, le=TIME_MS_MAX * US_PER_MS)]
    input: str
    output: str
    session_id: str = ""


class LmcacheRuns:
    """`RunReader` of LMCache traces."""

    block_tokens = BLOCK_TOKENS
    local_ids = False

    def __init__(self, tokenizer: str | None) -> None:
        """Create a reader.

        Args:
            tokenizer: path of a tokenizer.json; None counts four characters as a token.

        Raises:
            WorkloadUnusable: the tokenizer cannot be loaded.
        """
        self._tokenizer = tokenizer
        counted_by = f"the tokenizer {tokenizer}" if tokenizer else f"{TOKEN_CHARACTERS} characters per token"
        self.notes = [f"tokens are counted by {counted_by}"]
        if tokenizer:
            _tokenizer(tokenizer)

    def starts(self, path: Path) -> list[tuple[int, str]]:
        """Return start and name of each session in a file. See `RunReader.starts`."""
        return [(calls[0][1].timestamp, name) for name, calls in _calls(path, RowErrors(skip=True)).items()]

    def sessions(self, path: Path, errors: RowErrors) -> dict[str, PositionedTurns]:
        """Return the requests of each session in a file. See `RunReader.sessions`."""
        found: dict[str, PositionedTurns] = {}
        for name, calls in _calls(path, errors).items():
            placed: PositionedTurns = found.setdefault(name, [])
            for errors.row, call in calls:
                tokens, ids = self._prompt(call.input)
                answer = max(1, self._count(call.output))
                if reason := invalid_lengths(tokens, answer):
                    errors.report(reason)
                    continue
                number = len(placed)
                turn = Turn(
                    number=number,
                    prompt_tokens=tokens,
                    output_tokens=answer,
                    block_ids=ids,
                    at_us=call.timestamp - calls[0][1].timestamp,
                    after=(number - 1,) if number else (),
                    session_id="" if name == path.stem else f"/{name}",
                )
                placed.append((errors.row, turn))
        return found

    def _count(self, text: str) -> int:
        if self._tokenizer:
            return len(_tokenizer(self._tokenizer).encode(text, add_special_tokens=False).ids)
        return -(-len(text) // TOKEN_CHARACTERS)

    def _prompt(self, text: str) -> tuple[int, tuple[int, ...]]:
        """Return the number of tokens of a prompt, and its block ids."""
        if self._tokenizer:
            tokens = _tokenizer(self._tokenizer).encode(text, add_special_tokens=False).ids
            return len(tokens), _named(pack_u32(tokens), BLOCK_TOKENS * U32_BYTES)
        count = -(-len(text) // TOKEN_CHARACTERS)
        return count, _named(text.encode("utf-32-le"), BLOCK_TOKENS * TOKEN_CHARACTERS * 4)


def _named(content: bytes, size: int) -> tuple[int, ...]:
    """Return an id per block of `size` bytes: a hash of all bytes up to the end of the block, which may be partial."""
    before = 0
    names = []
    for at in range(0, len(content), size):
        before = xxh3_64_intdigest(content[at : at + size], before)
        names.append(before >> ID_BITS_CUT)
    return tuple(names)


def _calls(path: Path, errors: RowErrors) -> dict[str, list[tuple[int, _Call]]]:
    """Return the calls of each session with their line numbers, in the order of time."""
    decode = msgspec.json.Decoder(_Call).decode
    found: dict[str, list[tuple[int, _Call]]] = {}
    errors.unit = "line"
    for errors.row, _, line in lines(path):
        try:
            call = decode(line)
        except NOT_JSON as error:
            errors.report(str(error))
            continue
        found.setdefault(call.session_id, []).append((int(errors.row), call))
    for calls in found.values():
        calls.sort(key=lambda one: one[1].timestamp)
    return found


@cache
def _tokenizer(path: str) -> "Tokenizer":
    from tokenizers import Tokenizer  # noqa: PLC0415 - takes 0.2 s, and few workloads need it

    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # it has no other
        raise WorkloadUnusable(f"{path}: is not a tokenizer.json ({error})") from error
