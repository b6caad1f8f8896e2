"""Ids that are remembered for a while, against a plain dict."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.state import recent_ids
from forebay.core.state.recent_ids import RecentIds
from forebay.events.snapshots import Remembered

U64 = st.integers(0, (1 << 64) - 1)


@given(st.lists(st.one_of(st.tuples(U64, U64, st.integers(0, 5)), st.integers(0, 20)), max_size=60))
def test_any_history_is_that_of_a_dict_and_restores(history: list[tuple[int, int, int] | int]) -> None:
    ids, plain = RecentIds(), dict[int, tuple[int, int]]()
    due_us = now_us = 0
    for one in history:
        if isinstance(one, tuple):
            id_hash, content, later_us = one
            due_us += later_us
            if id_hash not in plain:
                ids.add(id_hash, content, due_us)
                plain[id_hash] = (content, due_us)
        else:
            now_us += one
            ids.forget(now_us)
            plain = {known: what for known, what in plain.items() if what[1] > now_us}
        assert {known: ids.get(known) for known in plain} == {known: content for known, (content, _) in plain.items()}
        assert (len(ids), ids.next_due_us()) == (len(plain), min((due for _, due in plain.values()), default=None))
    copy, fresh = RecentIds(), RecentIds()
    for chunk in ids.snapshot():
        copy.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(chunk), type=Remembered))
    for known, (content, when_us) in plain.items():
        fresh.add(known, content, when_us)
    assert copy.digest() == ids.digest() == fresh.digest()
    assert list(copy.snapshot()) == list(ids.snapshot())
    copy.forget(due_us)
    assert (len(copy), copy.digest(), list(copy.snapshot())) == (0, 0, [])


def test_memory_of_forgotten_ids_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_ids, "FORGOTTEN_MAX", 10)
    ids = RecentIds()
    for number in range(30):
        ids.add(number, 7, number)
        ids.forget(number - 10)
    (chunk,) = ids.snapshot()
    assert len(chunk.ids) == 8 * len(ids) == 8 * 10
    assert (ids.get(29), ids.get(0)) == (7, None)
