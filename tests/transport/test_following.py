"""Records that follow others are appended in the order of the calls, once the others are durable."""

from collections.abc import Callable, Sequence

import pytest

from forebay.transport.base import Draft, LogFull
from forebay.transport.following import Following


def drafts(*names: str) -> list[Draft]:
    return [Draft("topic", 0, name.encode()) for name in names]


class Written:
    """Drafts in the order of their appends; the test decides when they are durable."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self.durable: dict[str, Callable[[], None]] = {}
        self.is_full = False
        self.following = Following(self._write, self._write_followers)

    def _write(self, added: Sequence[Draft], on_durable: Callable[[], None] | None) -> None:
        if self.is_full:
            raise LogFull("full")
        self.values += [draft.value.decode() for draft in added]
        if on_durable is not None:
            self.durable[added[0].value.decode()] = on_durable

    def _write_followers(self, added: Sequence[Draft]) -> None:
        self.values += [draft.value.decode() for draft in added]


def test_followers_wait_for_their_drafts_and_for_earlier_followers() -> None:
    written = Written()
    written.following.append(drafts("a"), drafts("after a"))
    written.following.append(drafts("b"), drafts("after b"))
    written.following.append([], drafts("after nothing"))
    written.following.append(drafts("c"), [])
    written.durable["b"]()
    assert written.values == ["a", "b", "c"]
    written.durable["a"]()
    assert written.values == ["a", "b", "c", "after a", "after b", "after nothing"]
    assert not len(written.following)


def test_an_append_that_raises_does_not_block_later_followers() -> None:
    written = Written()
    written.is_full = True
    with pytest.raises(LogFull):
        written.following.append(drafts("a"), drafts("after a"))
    written.is_full = False
    written.following.append(drafts("b"), drafts("after b"))
    written.durable["b"]()
    assert written.values == ["b", "after b"]


def test_a_failed_log_appends_no_followers() -> None:
    written = Written()
    written.following.append(drafts("a"), drafts("after a"))
    written.following.clear()
    written.durable["a"]()
    assert written.values == ["a"]
