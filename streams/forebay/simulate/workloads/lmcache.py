"""LMCache's traces of agents: JSON lines of timestamp (us), input, output (text) and session_id, in no order.

A call follows on the one before it of its session: at its time, but not before that is answered. Text becomes tokens
by a tokenizer, or four characters each; blocks are named by the text up to their end, so equal beginnings are shared
by all sessions. Source: github.com/LMCache/lmcache-agent-trace.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.events.base import U32_BYTES, pack_u32
from forebay.simulate.workload import Turn, WorkloadUnusable
from forebay.simulate.workloads.lines import lines
from forebay.simulate.workloads.source import NOT_JSON, TIME_MS_MAX, US_PER_MS, Faults, Placed, lengths_fault

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BLOCK_TOKENS = 64
TOKEN_CHARACTERS = 4
ID_BITS_CUT = 11  # ids of 53 bits: what reads JSON elsewhere rounds longer ones


class _Call(msgspec.Struct, frozen=True):
    timestamp: Annotated[int, msgspec.Meta(ge=0, le=TIME_MS_MAX * US_PER_MS)]
    input: str
    output: str
    session_id: str = ""


class LmcacheRuns:
    """Files of such calls."""

    block_tokens = BLOCK_TOKENS
    local_ids = False

    def __init__(self, tokenizer: str | None) -> None:
        """`tokenizer`: path of a tokenizer.json. Raises WorkloadUnusable."""
        self._tokenizer = tokenizer
        self.notes = [f"tokens are those of {tokenizer}" if tokenizer else f"{TOKEN_CHARACTERS} characters are a token"]
        if tokenizer:
            _tokenizer(tokenizer)

    def starts(self, path: Path) -> list[tuple[int, str]]:
        """See RunReader. Raises WorkloadUnusable."""
        return [(calls[0][1].timestamp, name) for name, calls in _calls(path, Faults(skip=True)).items()]

    def sessions(self, path: Path, faults: Faults) -> dict[str, Placed]:
        """See RunReader. Raises WorkloadUnusable."""
        found: dict[str, Placed] = {}
        for name, calls in _calls(path, faults).items():
            placed: Placed = found.setdefault(name, [])
            for faults.row, call in calls:
                tokens, ids = self._prompt(call.input)
                answer = max(1, self._count(call.output))
                if reason := lengths_fault(tokens, answer):
                    faults.bad(reason)
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
                placed.append((faults.row, turn))
        return found

    def _count(self, text: str) -> int:
        if self._tokenizer:
            return len(_tokenizer(self._tokenizer).encode(text, add_special_tokens=False).ids)
        return -(-len(text) // TOKEN_CHARACTERS)

    def _prompt(self, text: str) -> tuple[int, tuple[int, ...]]:
        """How many tokens, and the names of their blocks."""
        if self._tokenizer:
            tokens = _tokenizer(self._tokenizer).encode(text, add_special_tokens=False).ids
            return len(tokens), _named(pack_u32(tokens), BLOCK_TOKENS * U32_BYTES)
        count = -(-len(text) // TOKEN_CHARACTERS)
        return count, _named(text.encode("utf-32-le"), BLOCK_TOKENS * TOKEN_CHARACTERS * 4)


def _named(content: bytes, size: int) -> tuple[int, ...]:
    """A name for each `size` bytes and all before them. One that is not full is nobody's but who ends there."""
    before = 0
    names = []
    for at in range(0, len(content), size):
        before = xxh3_64_intdigest(content[at : at + size], before)
        names.append(before >> ID_BITS_CUT)
    return tuple(names)


def _calls(path: Path, faults: Faults) -> dict[str, list[tuple[int, _Call]]]:
    """The calls of each session and the lines they stand in, in the order of time."""
    decode = msgspec.json.Decoder(_Call).decode
    found: dict[str, list[tuple[int, _Call]]] = {}
    faults.unit = "line"
    for faults.row, _, line in lines(path):
        try:
            call = decode(line)
        except NOT_JSON as error:
            faults.bad(str(error))
            continue
        found.setdefault(call.session_id, []).append((int(faults.row), call))
    for calls in found.values():
        calls.sort(key=lambda one: one[1].timestamp)
    return found


@cache
def _tokenizer(path: str) -> "Tokenizer":
    from tokenizers import Tokenizer  # noqa: PLC0415 - a fifth of a second, for who has text to count

    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # it has no other
        raise WorkloadUnusable(f"{path}: is no tokenizer ({error})") from error
