"""What is asked of a simulated system: requests that come at their times, or when others have their answers.

A workload can be read again and again, in any process, and is the same each time. Prompts are named, not written out:
an id stands for `block_tokens` tokens and all before them, so prompts that begin with the same ids begin alike.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Protocol

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.events.base import U64_BYTES, pack_u64


class WorkloadUnusable(Exception):
    """A workload that cannot be played; the text names the file, the row and the reason."""


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One request.

    Attributes:
        number: from 0 in the order of the workload; unique.
        prompt_tokens: at least 1; so is `output_tokens`.
        block_ids: 64-bit names of the prompt's blocks, the last perhaps not full; empty for a prompt like no other.
        at_us: when it comes, from the start of the workload; of one that follows on others, not before that.
        after: the numbers of those whose answers it waits for, all lower than its own.
        delay_us: from the last of these answers to its own arrival: think time, or a tool at work.
        session_id: whose turn it is; empty for nobody's.
        model: whom it is for; empty for the only one.
    """

    number: int
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    at_us: int = 0
    after: tuple[int, ...] = ()
    delay_us: int = 0
    session_id: str = ""
    model: str = ""


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is made of a workload before it is played.

    Attributes:
        speed: divides the times between arrivals; think times stay.
        duration_s: only what comes in the first so many seconds, as recorded and as though answers took no time.
        requests_max: only the first so many.
        prefix_multiplier: scales the lengths of what several prompts share.
        prefix_roots: so many copies of all that is shared, none of which shares anything with another.
        prompt_multiplier: scales the lengths of what belongs to one prompt alone.
        session_spacing_s: from the start of one run to that of the next, where a workload is of several runs.
        tokenizer: path of a tokenizer.json, for workloads of text; without one, 4 characters are a token.
        by_model: requests are for the models that they name; else all are for the only one.
        skip_bad_rows: rows that cannot be played are left out and counted, instead of ending the run.
        seed: of whatever is drawn.
    """

    speed: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    duration_s: float | None = None
    requests_max: int | None = None
    prefix_multiplier: float = 1.0
    prefix_roots: int = 1
    prompt_multiplier: float = 1.0
    session_spacing_s: float | None = None
    tokenizer: str | None = None
    by_model: bool = False
    skip_bad_rows: bool = False
    seed: int = 0


class Survey(msgspec.Struct, kw_only=True):
    """What a workload holds, found by reading it once.

    Attributes:
        requests: how many there are to play.
        skipped: rows left out as they cannot be played; `reasons` of the first of them, each with its row.
        notes: what a user should know of how it was read.
    """

    requests: int = 0
    skipped: int = 0
    reasons: list[str] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)


class Workload(Protocol):
    """Requests to play. Picklable; every process reads it for itself.

    Attributes:
        name: what to call it in a table.
        block_tokens: tokens that one of `Turn.block_ids` stands for.
    """

    name: str
    block_tokens: int

    def survey(self) -> Survey:
        """Read it once, check every row. Raises WorkloadUnusable."""
        ...

    def turns(self) -> Iterator[Turn]:
        """Every request: those that come at their times in the order of these, of one time in the order of the file.

        One that follows on others stands behind all of them, and before the next that comes at a time of its own
        unless it waits for that, too: who has read on to a later time knows all that may follow until then. Raises
        WorkloadUnusable for what `survey` would have found.
        """
        ...


def sequence_hashes(turn: Turn, block_tokens: int, block_size: int) -> bytes:
    """A packed u64 hash for each full block of `block_size` tokens of the prompt, shared exactly where its ids are.

    They name as much as those of real tokens do, but take no tokens to compute. A prompt without ids shares none.
    """
    full = turn.prompt_tokens // block_size
    if not turn.block_ids:
        return _ascending(xxh3_64_intdigest(b"turn %d" % turn.number) >> 1, full)
    before = first = passed = 0
    ones, steps = _lanes(block_tokens // block_size)
    width = block_tokens // block_size * U64_BYTES
    hashes = []
    for block in turn.block_ids:
        before = xxh3_64_intdigest(b"%d" % block, before)
        # Halved, so that the numbers after it are 64 bits long, too.
        if block_tokens % block_size:
            passed += block_tokens
            end = passed // block_size  # of the blocks that end within this id
            hashes.append(_ascending((before >> 1) + first, end - first))
            first = end
        else:
            hashes.append((((before >> 1) + first) * ones + steps).to_bytes(width, "little"))
            first += block_tokens // block_size
    return b"".join(hashes)[: full * U64_BYTES]


def _ascending(first: int, count: int) -> bytes:
    """`first` and the numbers after it, packed: as one long number, which takes no object for each."""
    ones, steps = _lanes(count)
    return (first * ones + steps).to_bytes(count * U64_BYTES, "little")


@lru_cache(maxsize=4_096)
def _lanes(count: int) -> tuple[int, int]:
    """`count` packed u64, as one number: all of them 1, and 0, 1, 2, …."""
    return int.from_bytes(pack_u64([1] * count), "little"), int.from_bytes(pack_u64(range(count)), "little")
