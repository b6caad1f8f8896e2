"""Any workload as a file in our own format."""

from collections.abc import Iterable, Iterator

import msgspec

from forebay.simulate.workload import Turn
from forebay.simulate.workloads.rows import Header, LinkedRow
from forebay.simulate.workloads.source import US_PER_MS


def written(turns: Iterable[Turn], header: Header) -> Iterator[bytes]:
    """The lines of a file that reads as these requests do. Raises what reading them does."""
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
    """Whole where it can be; the microseconds come back exactly, as a century has fewer than 2**53."""
    return us // US_PER_MS if us % US_PER_MS == 0 else us / US_PER_MS
