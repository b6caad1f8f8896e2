"""Synthetic conversation traces for simulator tests, with growing prompts and a common prefix."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from forebay.simulate.workload import Survey, Turn
from forebay.simulate.workloads.rows import BLOCK_TOKENS, MooncakeRow

SEED = 20_261


def conversations(sessions: int, turns: int, every_ms: int = 150) -> list[MooncakeRow]:
    """Return the turns of all sessions, interleaved. Each prompt extends the previous one; two rows share each time."""
    rng = random.Random(SEED)
    last: dict[int, list[int]] = {session: [0] for session in range(sessions)}
    rows: list[MooncakeRow] = []
    for number in range(sessions * turns):
        ids = last[number % sessions]
        ids += [number * 10 + more for more in range(1, rng.randrange(2, 6))]
        length = len(ids) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)
        rows.append(MooncakeRow(number // 2 * every_ms, length, rng.randrange(1, 150), list(ids)))
    return rows


def turn_of(row: MooncakeRow, number: int, speed: float = 1.0) -> Turn:
    return Turn(
        number=number,
        prompt_tokens=row.input_length,
        output_tokens=row.output_length,
        block_ids=tuple(row.hash_ids),
        at_us=round(row.timestamp * 1_000 / speed),
    )


class Rows:
    name = "rows"
    block_tokens = BLOCK_TOKENS

    def __init__(self, rows: Sequence[MooncakeRow], speed: float = 1.0) -> None:
        self._rows = rows
        self._speed = speed

    def survey(self) -> Survey:
        return Survey(requests=len(self._rows))

    def turns(self) -> Iterator[Turn]:
        for number, row in enumerate(self._rows):
            yield turn_of(row, number, self._speed)


def write(path: Path, rows: list[MooncakeRow]) -> Path:
    path.write_text(
        "".join(json.dumps({name: getattr(row, name) for name in row.__struct_fields__}) + "\n" for row in rows)
    )
    return path
