"""Writer of workloads in forebay's own format."""

from collections.abc import Iterable, Iterator

import msgspec

from forebay.simulate.workload import Turn
from forebay.simulate.workloads.rows import LinkedRow, WorkloadHeader
from forebay.simulate.workloads.source import US_PER_MS


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
