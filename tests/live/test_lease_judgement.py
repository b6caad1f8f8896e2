"""Judgement of leases: renewed late, vanished, released, failed together, and timed by observed time."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.live.owner.lease_judgement import TTL_UNKNOWN_MS, LeaseJudge, ObservedTime, Standing
from forebay.transport.base import Lease

TTL_MS = 3_000
POLL_MS = 500
ALIVE, LATE, VANISHED, EXCUSED, LOST = Standing


class PolledHolders:
    """Lease holders, polled every half second, of which a test names those that renew."""

    def __init__(self, names: str, *, inherited: bool = False) -> None:
        self.judge = LeaseJudge()
        self.leases: dict[str, Lease] = {}
        self.now_ms = 1_000_000
        self.standings: dict[str, Standing] = {}
        self.reasons: dict[str, str] = {}
        for name in names:
            self.renew(name)
            self.judge.add(name, name, TTL_MS, None if inherited else self.leases[name])

    def renew(self, name: str, token: str = "", *, released: bool = False) -> None:
        self.leases[name] = Lease(
            worker_id=name,
            token=token or name,
            payload=b"",
            expires_in_ms=TTL_MS,
            ttl_ms=TTL_MS,
            deadline_ms=self.now_ms + TTL_MS,
            released=released,
        )

    def poll(self, renewing: Iterable[str] = "", times: int = 1, *, observed_ms: int = POLL_MS) -> str:
        """Poll `times` times; return the standing of each holder, in the order of names."""
        for _ in range(times):
            self.now_ms += POLL_MS
            for name in renewing:
                self.renew(name)
            verdicts = self.judge.poll(self.leases, observed_ms)
            self.standings = {name: verdict.standing for name, verdict in verdicts.items()}
            self.reasons = {name: verdict.reason for name, verdict in verdicts.items()}
            for name, standing in self.standings.items():
                if standing is LOST:
                    self.judge.remove(name)
                    self.leases.pop(name, None)
        return " ".join(self.standings.values())

    def flush(self) -> None:
        self.leases.clear()


def test_a_silent_holder_is_late_and_then_lost() -> None:
    group = PolledHolders("abc")
    seen = [group.poll("bc") for _ in range(6)]
    assert [one.split()[0] for one in seen] == ["alive", "alive", "late", "late", "late", "lost"]
    assert group.reasons["a"] == "its lease of 3000 ms expired"
    assert group.poll("bc") == "alive alive"


def test_a_late_holder_that_renews_is_alive() -> None:
    group = PolledHolders("abc")
    assert group.poll("bc", 4) == "late alive alive"
    assert group.poll("abc") == "alive alive alive"
    assert group.poll("bc", 2) == "alive alive alive"


def test_one_vanished_lease_is_in_doubt_for_one_ttl() -> None:
    group = PolledHolders("abc")
    del group.leases["a"]
    assert group.poll("bc", 6) == "vanished alive alive"
    assert group.poll("bc") == "lost alive alive"
    assert group.reasons["a"] == "its lease of 3000 ms vanished and was not acquired again"
    assert group.judge.faults == 0


def test_a_vanished_lease_that_is_acquired_again_is_alive() -> None:
    group = PolledHolders("abc")
    del group.leases["a"]
    assert group.poll("bc", 6) == "vanished alive alive"
    assert group.poll("abc") == "alive alive alive"


def test_a_released_lease_and_a_foreign_token_are_losses_at_once() -> None:
    group = PolledHolders("abc")
    group.renew("a", released=True)
    group.renew("b", token="another")
    assert group.poll("c") == "lost lost alive"
    assert group.reasons["a"] == "its lease was released"
    assert group.reasons["b"] == "another incarnation took over its lease"


@pytest.mark.parametrize("names", ["a", "ab", "abcd"])
def test_leases_that_vanish_together_are_all_excused(names: str) -> None:
    group = PolledHolders(names)
    for _ in range(20):
        group.flush()
        assert set(group.poll().split()) == {EXCUSED}
        assert set(group.poll(names).split()) == {ALIVE}
    assert group.judge.faults == 20


def test_holders_that_are_dead_after_a_flush_are_lost_after_two_ttls() -> None:
    group = PolledHolders("abcd")
    group.flush()
    assert group.poll() == "excused excused excused excused"
    assert group.poll("cd", 5) == "excused excused alive alive"
    assert group.poll("cd") == "vanished vanished alive alive"
    assert group.poll("cd", 5) == "vanished vanished alive alive"
    assert group.poll("cd") == "lost lost alive alive"


def test_a_dead_holder_is_lost_however_often_the_store_is_flushed() -> None:
    group = PolledHolders("abc")
    polls = 0
    while "a" in group.judge.poll(group.leases, 0):
        group.flush()
        group.poll()
        group.poll("bc")
        polls += 2
        assert polls < 60
    assert set(group.poll("bc").split()) <= {ALIVE, EXCUSED}


def test_holders_that_all_stop_renewing_are_excused_first_and_lost_later() -> None:
    group = PolledHolders("abc")
    assert group.poll(times=3) == "excused excused excused"
    assert group.judge.faults == 1
    assert group.poll(times=5) == "excused excused excused"
    assert group.poll() == "late late late"
    assert group.poll(times=3) == "lost lost lost"
    assert group.judge.faults == 1


def test_silence_and_absence_share_one_excuse() -> None:
    group = PolledHolders("abc")
    assert group.poll(times=3) == "excused excused excused"
    assert group.poll("bc", 6) == "late alive alive"
    group.flush()
    assert group.poll() == "vanished excused excused"


def test_the_only_holder_is_not_excused_for_its_silence() -> None:
    group = PolledHolders("a")
    assert group.poll(times=3) == "late"
    assert group.poll(times=3) == "lost"


def test_a_clock_jump_of_the_store_loses_no_holder() -> None:
    group = PolledHolders("ab")
    for jump_ms in (3_600_000, -7_200_000):
        group.now_ms += jump_ms
        group.leases = {
            name: Lease(
                worker_id=name,
                token=name,
                payload=b"",
                expires_in_ms=lease.deadline_ms - group.now_ms,
                ttl_ms=TTL_MS,
                deadline_ms=lease.deadline_ms,
            )
            for name, lease in group.leases.items()
        }
        assert group.poll() == "alive alive"
        assert group.poll("ab") == "alive alive"


def test_an_owner_that_was_paused_needs_two_polls_for_a_loss() -> None:
    group = PolledHolders("abc")
    assert group.poll("bc", observed_ms=60_000) == "late alive alive"
    assert group.poll("abc", observed_ms=60_000) == "alive alive alive"
    assert group.poll("bc", 2, observed_ms=60_000) == "lost alive alive"


def test_a_vanished_lease_keeps_its_grace_period_when_the_owner_pauses() -> None:
    group = PolledHolders("abc")
    del group.leases["a"]
    assert group.poll("bc") == "vanished alive alive"
    assert group.poll("bc", observed_ms=60_000) == "vanished alive alive"
    assert group.poll("bc", observed_ms=60_000) == "lost alive alive"


def test_a_new_owner_gives_absent_holders_a_grace_period() -> None:
    group = PolledHolders("ab", inherited=True)
    group.flush()
    assert group.poll() == "vanished vanished"
    assert group.poll(times=5) == "vanished vanished"
    assert group.poll("b") == "lost alive"


def test_a_new_owner_without_the_ttl_waits_for_the_longest_ttl() -> None:
    judge = LeaseJudge()
    judge.add("a", "a", 0)
    polls = 0
    while judge.poll({}, POLL_MS)["a"].standing is not LOST:
        polls += 1
    assert polls * POLL_MS == TTL_UNKNOWN_MS


def test_a_new_owner_treats_a_late_holder_as_in_doubt() -> None:
    group = PolledHolders("ab", inherited=True)
    group.leases["a"] = Lease(worker_id="a", token="a", payload=b"", expires_in_ms=-5_000, ttl_ms=TTL_MS, deadline_ms=5)
    assert group.poll("b") == "late alive"
    assert group.poll("b", 3) == "lost alive"


def test_only_time_between_two_readable_polls_counts() -> None:
    observed = ObservedTime()
    assert observed.read(10.0) == 0
    assert observed.read(10.5) == 500
    observed.failed()
    assert observed.read(70.0) == 0
    assert observed.read(70.25) == 250


@given(st.lists(st.sampled_from(["renew", "silent", "flush", "away"]), max_size=60))
def test_a_holder_that_renews_within_an_observed_ttl_is_never_lost(steps: list[str]) -> None:
    """Whatever happens to the store, a holder that reacquires its lease within half a TTL stays."""
    group, observed, now_s, unrenewed = PolledHolders("abc"), ObservedTime(), 0.0, 0
    for step in steps:
        now_s += 0.5
        if step == "away":
            observed.failed()
            continue
        if step == "flush":
            group.flush()
        unrenewed = unrenewed + 1 if step != "renew" else 0
        renewing = "abc" if unrenewed in (0, 3) else ""
        unrenewed %= 3
        group.poll(renewing, observed_ms=observed.read(now_s))
        assert LOST not in group.standings.values()
