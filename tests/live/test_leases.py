"""Judgement of leases, the presence of ingresses, and the partitions of groups."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Any

import fakeredis
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.state.fleet import Fleet
from forebay.events.codec import decode, encode
from forebay.events.decisions import Advanced, RequestAborted
from forebay.events.fleet import IngressJoined, IngressLost
from forebay.events.groups import GroupPlaced
from forebay.events.requests import RequestCancelled, RequestResumed
from forebay.events.topics import FLEET, GROUPS, work_topic
from forebay.events.work import WorkCancelled
from forebay.journal.groups import groups_of
from forebay.live.owner import ingress_presence
from forebay.live.owner.ingress_presence import GRACE_MS, IngressPresence
from forebay.live.owner.lease_judgement import TTL_UNKNOWN_MS, LeaseJudge, ObservedTime, Standing
from forebay.live.router.placement import GroupPlacement, placement_metrics
from forebay.transport.base import Draft, Lease
from forebay.transport.directory import Directory
from forebay.transport.redis.leases import RedisLeases, embedded_leases
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import SharedLog, applied_fleet, background, lease_of
from tests.system import MODEL, System, submitted, until, until_ended

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
        self.leases[name] = lease_of(name, token or name, TTL_MS, renewed=self.now_ms, released=released)

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
        for name, lease in group.leases.items():
            left_ms = lease.deadline_ms - group.now_ms
            group.leases[name] = msgspec.structs.replace(lease, expires_in_ms=left_ms)
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
    group.leases["a"] = lease_of("a", "a", TTL_MS, left_ms=-5_000)
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


# Ingress leases become events on `fleet`, and an owner cancels the requests of a lost ingress

HALF_MS = TTL_MS // 2


def lease(name: str = "i1", token: str = "t", **changes: Any) -> Lease:
    return lease_of(name, token, TTL_MS, **changes)


class PolledIngresses:
    """The ingress leases as polled by an owner that has applied all of `fleet`. `busy` incarnations have requests."""

    def __init__(self, log: SqliteLog, fleet: Fleet | None = None, busy: Collection[str] = ()) -> None:
        self.log = log
        self.busy = set(busy)
        fleet = Fleet() if fleet is None else fleet
        self.presence = IngressPresence(log, 0, 7, fleet, is_busy=lambda incarnation: incarnation in self.busy)

    async def poll(self, *leases: Lease, observed_ms: int = 500) -> list[Lease]:
        return await self.presence.update(
            list(leases), applied_fleet(self.log), self.log.next_offset(FLEET.name, 0), observed_ms
        )

    def facts(self) -> list[tuple[type, str, str]]:
        events = [decode(FLEET, record.value) for record in self.log.records(FLEET.name, 0, 0, 100)]
        return [(type(event), event.ingress_id, event.incarnation) for event in events]


@pytest.fixture
def polled(log: SqliteLog) -> PolledIngresses:
    return PolledIngresses(log)


async def test_an_ingress_joins_by_its_lease_and_is_lost_when_it_expires(polled: PolledIngresses) -> None:
    await polled.poll(lease())
    await polled.poll(lease(renewed=1))
    await polled.poll(lease(renewed=1), observed_ms=HALF_MS)
    dead = lease(renewed=1, left_ms=-1)
    await polled.poll(dead, observed_ms=HALF_MS)
    assert await polled.poll(dead) == [dead]
    assert polled.facts() == [(IngressJoined, "i1", "t"), (IngressLost, "i1", "t")]


async def test_a_restarted_or_released_ingress_is_lost_at_once(polled: PolledIngresses) -> None:
    await polled.poll(lease())
    await polled.poll(lease(token="t2"))
    await polled.poll(lease(token="t2", released=True))
    assert polled.facts() == [
        (IngressJoined, "i1", "t"),
        (IngressLost, "i1", "t"),
        (IngressJoined, "i1", "t2"),
        (IngressLost, "i1", "t2"),
    ]


async def test_an_ingress_that_released_its_lease_left_and_a_replaced_one_is_lost(
    log: SqliteLog, polled: PolledIngresses, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forebay")
    await polled.poll(lease(), lease("i2"), lease("i3"), lease("i4"))
    await polled.poll(lease(released=True), lease("i2", token="t2"), lease("i3"), lease("i4", token="t4"))
    await PolledIngresses(log, applied_fleet(log), busy={"t4"}).poll(lease("i2", token="t3"), lease("i4", token="t5"))
    outcomes = [(record.levelname, record.getMessage().partition(":")[0]) for record in caplog.records]
    assert [one for one in outcomes if "joined" not in one[1]] == [
        ("INFO", "ingress i1 left"),
        ("WARNING", "ingress i2 is lost"),
        ("WARNING", "ingress i4 is lost"),
        ("INFO", "ingress i2 ended while no router was running"),
        ("WARNING", "ingress i4 is lost"),
    ]


def dead(way: str) -> list[Lease]:
    """Return the leases after the incarnation `t` of the ingress i1 was lost in one of three ways."""
    return {"released": [lease(released=True)], "replaced": [lease(token="t2")], "gone": []}[way]


LOSS_MS = {"released": 0, "replaced": 0, "gone": TTL_MS}  # time until the loss of a lease is certain


async def lose(polled: PolledIngresses, way: str) -> None:
    """Let the ingress i1 join, and lose it while another one stays."""
    await polled.poll(lease(), lease("i2"))
    for renewed in range(LOSS_MS[way] // HALF_MS + 1):
        await polled.poll(*dead(way), lease("i2", renewed=renewed + 1), observed_ms=HALF_MS)


@pytest.mark.parametrize("way", LOSS_MS)
async def test_a_lost_ingress_for_which_clients_wait_has_a_grace_time(way: str, log: SqliteLog) -> None:
    polled = PolledIngresses(log, busy={"t"})
    await lose(polled, way)
    joined = [(IngressJoined, "i1", "t"), (IngressJoined, "i2", "t")]
    left_ms = GRACE_MS
    while left_ms > 0:
        assert polled.facts() == joined
        left_ms -= 500
        await polled.poll(*dead(way), lease("i2", renewed=100 + left_ms))
    after = [(IngressJoined, "i1", "t2")] if way == "replaced" else []
    assert polled.facts() == [*joined, (IngressLost, "i1", "t"), *after]


async def test_the_grace_time_ends_early_with_the_requests_and_begins_again_with_a_new_owner(log: SqliteLog) -> None:
    polled = PolledIngresses(log, busy={"t"})
    await lose(polled, "released")
    await polled.poll(*dead("released"), observed_ms=100 * GRACE_MS)  # a pause of the owner counts for half of it
    successor = PolledIngresses(log, applied_fleet(log), busy={"t"})
    for _ in range(2):
        await successor.poll(*dead("released"), observed_ms=GRACE_MS // 2)
    assert IngressLost not in [kind for kind, *_ in polled.facts()]
    successor.busy.clear()
    assert await successor.poll(*dead("released")) == []
    assert polled.facts()[-1] == (IngressLost, "i1", "t")
    assert await successor.poll(*dead("released")) == dead("released")


async def test_an_ingress_that_renews_its_lease_in_its_grace_time_is_not_lost(log: SqliteLog) -> None:
    polled = PolledIngresses(log, busy={"t"})
    await lose(polled, "gone")
    for renewed in range(1, 40):
        await polled.poll(lease(renewed=renewed), lease("i2", renewed=10 + renewed))
    assert [kind for kind, *_ in polled.facts()] == [IngressJoined] * 2
    await polled.poll(lease(released=True), lease("i2", renewed=99))
    polled.busy.clear()
    await polled.poll(lease(released=True), lease("i2", renewed=100))
    assert polled.facts()[-1] == (IngressLost, "i1", "t")


async def test_a_foreign_record_may_remove_an_ingress_in_its_grace_time(log: SqliteLog) -> None:
    polled = PolledIngresses(log, busy={"t"})
    await lose(polled, "replaced")
    forged = IngressLost(owner_epoch=7, ingress_id="i1", incarnation="t")
    await log.append([Draft(FLEET.name, 0, encode(FLEET, forged))])
    await polled.poll(*dead("replaced"), lease("i2", renewed=100))
    assert polled.facts()[-1] == (IngressJoined, "i1", "t2")


async def test_a_flushed_store_loses_no_ingress_even_for_a_new_owner(log: SqliteLog, polled: PolledIngresses) -> None:
    await polled.poll(lease(), lease("i2"))
    for renewed in range(1, 10):
        await polled.poll()
        await polled.poll(lease(renewed=renewed), lease("i2", renewed=renewed))
    successor = PolledIngresses(log, applied_fleet(log))
    await successor.poll()
    await successor.poll(lease(renewed=11), lease("i2", renewed=11))
    assert [kind for kind, *_ in successor.facts()] == [IngressJoined] * 2


async def test_invalid_ingress_names_are_rejected_once(polled: PolledIngresses) -> None:
    for _ in range(3):
        await polled.poll(lease("x" * 257))
    assert polled.facts() == []
    assert polled.presence.refused == {"name": 1}


async def test_an_owner_cancels_the_requests_of_a_killed_ingress(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress_presence, "GRACE_MS", 2)
    leases = embedded_leases()
    async with System(log).started(workers=0) as system, system.owned(ingress_leases=leases) as owner:
        system.start_worker("w0", speedup=3.0)
        leases.acquire(MODEL, "i1", "mine", b"", 60_000)
        await until(lambda: owner.world.fleet.ingresses() and len(owner.world.fleet))
        for name, incarnation in (("http", "mine"), ("other", "another"), ("kafka", "")):
            system.send(submitted(name, [1, 2, 3], max_tokens=150, ingress_incarnation=incarnation))
        await until(lambda: len(owner.world.requests) == 3)
        leases.acquire(MODEL, "i1", "after a restart", b"", 60_000)
        for name in ("http", "other", "kafka"):
            await until_ended(system, name)
        await until(lambda: not len(owner.world.requests))
    aborted = [(one.request_id, one.reason, one.message) for one in system.decisions(RequestAborted)]
    assert aborted == [
        ("http", "ingress_lost", "the ingress i1 of the request was lost: another incarnation took over its lease")
    ]
    cancelled = system.events(work_topic("default"), WorkCancelled)
    assert [one.request_id for one in cancelled] == ["http"]


async def test_a_request_that_is_resumed_in_the_grace_time_survives_its_ingress(log: SqliteLog) -> None:
    leases = embedded_leases()
    async with System(log).started(workers=1) as system, system.owned(ingress_leases=leases) as owner:
        leases.acquire(MODEL, "i1", "mine", b"", 60_000)
        await until(lambda: owner.world.fleet.ingresses() and len(owner.world.fleet))
        system.send(submitted("r", [1, 2, 3], max_tokens=150, ingress_incarnation="mine"))
        await until(lambda: len(owner.world.requests))
        leases.release(MODEL, "i1", "mine")
        system.send(submitted("read twice", [1, 2, 3], max_tokens=150, ingress_incarnation="third"))
        for name in ("r", "read twice"):
            system.send(RequestResumed(request_id=name, ingress_incarnation="another"))
        system.send(RequestCancelled(request_id="r", ingress_incarnation="mine"))
        system.send(RequestCancelled(request_id="read twice", ingress_incarnation="another"))
        await until(lambda: system.events(FLEET, IngressLost))
        journaled = [run.topic for one in system.decisions(Advanced) for run in one.consumed]
        assert "requests" in journaled, "a next owner could apply the loss first"
        for name in ("r", "read twice"):
            await until_ended(system, name)
            assert len(system.answer(name)) == 150
    assert system.decisions(RequestAborted) == []


# Groups get partitions from leases, and all readers see the same directory

LONG_MS = 60_000


@pytest.fixture
async def directory(log: SqliteLog) -> AsyncIterator[Directory]:
    started = Directory(SharedLog(log))
    await started.start()
    yield started
    started.close()


def acquire(leases: RedisLeases, *groups: str) -> None:
    for group in groups:
        leases.acquire(group, "w", "t", b"", LONG_MS)


async def place(log: SqliteLog, group: str, partition: int) -> None:
    await log.append([Draft(GROUPS.name, 0, encode(GROUPS, GroupPlaced(group=group, partition=partition)))])


def placements(log: SqliteLog) -> list[tuple[bytes | None, str, int]]:
    records = log.records(GROUPS.name, 0, 0, 100)
    events = [(record.key, decode(GROUPS, record.value)) for record in records]
    return [(key, event.group, event.partition) for key, event in events]


async def test_groups_get_the_lowest_free_partition_once(log: SqliteLog, directory: Directory) -> None:
    leases = embedded_leases()
    placement = GroupPlacement(log, leases, directory, 4)
    acquire(leases, "b", "a")
    await placement.update()
    await place(log, "elsewhere", 3)
    acquire(leases, "c")
    for _ in range(3):
        await placement.update()
    assert placements(log) == [(b"a", "a", 0), (b"b", "b", 1), (None, "elsewhere", 3), (b"c", "c", 2)]
    assert [directory.partition_of(group) for group in ("a", "b", "c", "unknown")] == [0, 1, 2, None]
    assert [directory.group_in(partition) for partition in range(4)] == ["a", "b", "c", "elsewhere"]


async def test_without_a_free_partition_a_group_is_rejected_and_logged_once(
    log: SqliteLog, directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    leases = embedded_leases()
    placement = GroupPlacement(log, leases, directory, 1)
    acquire(leases, "a", "b", "c")
    for _ in range(3):
        await placement.update()
    assert placements(log) == [(b"a", "a", 0)]
    assert placement.refused == 2
    assert caplog.text.count("because all 1 of this namespace belong to other models: a; free one with") == 2
    await place(log, "b", 0)
    await directory.reach(2)
    metrics = {metric.name: metric for metric in placement_metrics(placement, directory).collect()}
    assert metrics["forebay_groups"].samples[0].value == 1
    assert metrics["forebay_groups_refused"].samples[0].value == 2
    assert metrics["forebay_placements_ignored"].samples[0].labels == {"reason": "partition_taken"}
    leases.release("a", "w", "t")
    await log.append([Draft(GROUPS.name, 0, b"", b"a")])
    assert directory.partition_of("a") is None
    await placement.update()
    assert directory.groups.partitions == await groups_of(log) == {"b": 0}


async def test_an_invalid_model_name_gets_no_partition(
    log: SqliteLog, directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    leases = embedded_leases()
    placement = GroupPlacement(log, leases, directory, 4)
    bad = ("../x", "a\nb", "a\0b", " a", "a" * 257)
    acquire(leases, *bad, "org/model:tag")
    for _ in range(2):
        await placement.update()
    assert placements(log) == [(b"org/model:tag", "org/model:tag", 0)]
    assert placement.refused == len(bad)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(messages) == len(bad)
    assert all(line.isprintable() for line in messages)


async def test_two_concurrent_placements_converge(log: SqliteLog, directory: Directory) -> None:
    """The second does not see the placements of the first; readers follow the log, and no partition is shared."""
    leases = embedded_leases()
    acquire(leases, "a", "b")
    other = Directory(SharedLog(log))
    await other.start()
    both = [GroupPlacement(SharedLog(log), leases, seen, 4) for seen in (directory, other)]
    for _ in range(3):
        await asyncio.gather(*(placement.update() for placement in both))
    late = Directory(log)
    await late.start()
    assert late.groups.partitions == directory.groups.partitions == other.groups.partitions
    assert sorted(late.groups.partitions) == ["a", "b"]
    assert len(set(late.groups.partitions.values())) == 2
    other.close()
    late.close()


async def test_a_waiter_for_a_group_is_notified(log: SqliteLog, directory: Directory) -> None:
    changes = []
    directory.on_change = lambda: changes.append(dict(directory.groups.partitions))
    async with background(directory.run()):
        waiting = [asyncio.create_task(directory.placed(group)) for group in ("a", "b", "a")]
        await log.append([Draft(GROUPS.name, 0, b"no placement")])
        await place(log, "a", 5)
        await place(log, "b", 6)
        assert await asyncio.gather(*waiting) == [5, 6, 5]
        assert directory.undecodable == 1
        assert changes[-1] == {"a": 5, "b": 6}


async def test_unreadable_leases_change_nothing(
    log: SqliteLog, directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    server = fakeredis.FakeServer()
    server.connected = False
    placement = GroupPlacement(log, RedisLeases(fakeredis.FakeRedis(server=server)), directory, 4)
    await placement.update()
    assert placements(log) == []
    assert "cannot be read" in caplog.text
