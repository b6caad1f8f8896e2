"""One record of a recording is changed and sealed again: verification detects it and never crashes."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.topics import SNAPSHOTS
from forebay.replay.checks import FOREIGN_PROGRESS
from forebay.transport.base import LogError
from tests.core.worlds import actions
from tests.depth import examples
from tests.replay.histories import Topics, journal_follows, verified, written

HISTORIES = st.lists(actions(), min_size=20, max_size=90)


def remove(values: list[bytes], at: int, _: Random) -> None:
    del values[at]


def repeat(values: list[bytes], at: int, _: Random) -> None:
    values.insert(at, values[at])


def swap(values: list[bytes], at: int, chance: Random) -> None:
    other = chance.randrange(len(values))
    values[at], values[other] = values[other], values[at]


def flip(values: list[bytes], at: int, chance: Random) -> None:
    value = bytearray(values[at])
    value[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
    values[at] = bytes(value)


def number(values: list[bytes], at: int, chance: Random) -> None:
    """Change a digit of a clock reading, count, term, hash or seq."""
    places = [place for place, byte in enumerate(values[at]) if chr(byte).isdigit()]
    if places:
        value = bytearray(values[at])
        value[chance.choice(places)] = ord(chance.choice("0123456789"))
        values[at] = bytes(value)


def garbage(values: list[bytes], at: int, chance: Random) -> None:
    values[at] = chance.randbytes(chance.randrange(40))


MUTATIONS: tuple[Callable[[list[bytes], int, Random], None], ...] = (remove, repeat, swap, flip, number, garbage)


@pytest.mark.parametrize("mutation", MUTATIONS)
@examples(0.4)
@given(history=HISTORIES, seed=st.integers(0, 1 << 32))
def test_every_change_of_a_derived_record_is_detected(
    mutation: Callable[[list[bytes], int, Random], None], history: list[tuple[str, Any]], seed: int
) -> None:
    topics, chance = written(history), Random(seed)
    whole = verified(topics)
    assert (whole.divergence, whole.verified) == (None, whole.decisions)
    # In a generated history, a worker may report on a queued request.
    assert whole.unverified.keys() <= {FOREIGN_PROGRESS}
    for _ in range(4):
        changed: Topics = {topic: list(values) for topic, values in topics.items()}
        topic = chance.choice([name for name in sorted(changed) if changed[name]])
        mutation(changed[topic], chance.randrange(len(changed[topic])), chance)
        try:
            report = verified(changed)
        except LogError:
            continue
        if report.divergence is None and report.unverified.keys() <= {FOREIGN_PROGRESS}:
            assert topic == SNAPSHOTS.name or journal_follows(changed)
