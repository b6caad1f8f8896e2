"""Generated histories written to a log as their owners would write them, including takeovers, crashes and snapshots."""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from hypothesis import strategies as st

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.step import AnyDecision, InputEvent, advance, claim, open_run, step
from forebay.core.world import CORE_VERSION, World
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.decisions import Advanced, JournalRecord, OwnerClaimed, SnapshotTaken
from forebay.events.snapshots import SnapshotChunk
from forebay.events.topics import DECISIONS, INPUTS, SNAPSHOTS, topic_named
from forebay.events.versions import EVENTS_VERSION
from forebay.journal.records import decode_or_none
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import Driver, actions, perform

T = TypeVar("T")

GARBAGE = b"\xc1 nobody reads this"
PARTS_A_CHUNK = 3


class Sealed(NamedTuple):
    """Snapshot that is being written."""

    first_offset: int
    chunks: int
    digest: str
    journal_offset: int
    snapshot_id: str


class WrittenDriver(Driver):
    """Driver that keeps its events and decisions as drafts for a log. With a name, its owners have nonces."""

    def __init__(self, custom: CustomPolicies = ONLY_BUILT_IN, name: str = "") -> None:
        super().__init__(custom=custom)
        self._name = name
        self._policies = tuple(sorted(custom))
        self.drafts: list[Draft] = []
        self.crashes = False
        self._journalled = 0
        self._chunks = 0
        self._sealed: Sealed | None = None
        self.take_over("owner")

    def __call__(self, topic: str, event: InputEvent | None, after_us: int = 10) -> list[Any]:
        value = GARBAGE if event is None else encode(topic_named(topic), event)
        self.drafts.append(Draft(topic, 0, value, b"a key", {"header": "a value"}))
        return self._journal(super().__call__(topic, event, after_us))

    def wait(self, us: int) -> list[Any]:
        return self._journal(super().wait(us))

    def write(self, record: JournalRecord) -> None:
        self.drafts.append(Draft(DECISIONS.name, 0, encode(DECISIONS, record), b"a key", {"header": "a value"}))
        self._journalled += 1

    def take_over(self, owner_id: str = "another") -> None:
        offset = self._journalled
        claimed = OwnerClaimed(
            owner_id=owner_id,
            core_version=CORE_VERSION,
            events_version=EVENTS_VERSION,
            policies=self._policies,
            owner_nonce=f"{self._name}-{offset}" if self._name else "",
            previous_nonce=self.world.owner_nonce,
        )
        self.write(claimed)
        claim(self.world, offset, self._policies, EVENTS_VERSION, claimed.owner_nonce)
        self._sealed = None

    def write_stale_record(self) -> None:
        """Write a record of the previous owner, as if it had not noticed the takeover."""
        if self.world.owner_epoch:
            lie = advance(Driver().world)
            self.write(msgspec.structs.replace(lie, owner_epoch=self.world.owner_epoch - 1))

    def write_foreign_record(self) -> None:
        self.drafts.append(Draft(DECISIONS.name, 0, GARBAGE))
        self._journalled += 1

    def seal(self) -> None:
        """Begin a snapshot of the current state. The journal records it later."""
        sealed = advance(self.world)
        self.write(sealed)
        parts, snapshot_id = list(self.world.snapshot()), sealed.digest if self._name else ""
        chunks = [tuple(parts[start : start + PARTS_A_CHUNK]) for start in range(0, len(parts), PARTS_A_CHUNK)]
        for number, part in enumerate(chunks):
            epoch = self.world.owner_epoch
            chunk = SnapshotChunk(owner_epoch=epoch, number=number, parts=part, snapshot_id=snapshot_id)
            self.drafts.append(Draft(SNAPSHOTS.name, 0, encode(SNAPSHOTS, chunk), b"a key"))
        self._sealed = Sealed(self._chunks, len(chunks), sealed.digest, self._journalled, snapshot_id)
        self._chunks += len(chunks)

    def finish_snapshot(self) -> None:
        if self._sealed is not None:
            sealed, self._sealed = self._sealed, None
            self.write(SnapshotTaken(**self.world.stamp(), **sealed._asdict(), core_version=CORE_VERSION))

    def _journal(self, made: list[Any]) -> list[Any]:
        if self.crashes and len(made) > 1:
            self.crashes = False
            first, *rest = made
            self.write(first)
            self.take_over()
            made = [first, *(msgspec.structs.replace(one, owner_epoch=self.world.owner_epoch) for one in rest)]
            for record in made[1:]:
                self.write(record)
        else:
            for record in made:
                self.write(record)
        return made


OWNERS = ("take over", "crash", "stale", "foreign", "seal", "taken")

owner_histories = st.lists(
    st.one_of(*[actions()] * 8, st.sampled_from(OWNERS).map(lambda kind: (kind, None))), max_size=120
)


def dense_history(seed: int, length: int = 250) -> list[tuple[str, Any]]:
    """Return a long seeded history with workers present and mostly request events."""
    draw = random.Random(seed)
    kinds = (
        *("request",) * 10,
        *("first", "finish", "stored") * 3,
        *("grow", "fail", "query", "removed", "cleared", "report", "cancel", "again", "pool", "busy", "wait"),
        *("garbage",),
        *("join", "join", "join", "lose", "suspect", "recover"),
        *OWNERS,
    )
    return [(draw.choice(kinds), (draw.randrange(10), draw.randrange(9), draw.randrange(3))) for _ in range(length)]


def played(history: list[tuple[str, Any]], drive: WrittenDriver | None = None) -> WrittenDriver:
    drive = drive or WrittenDriver()
    drive.fleet("a", "b")
    for number, action in enumerate(history):
        match action[0]:
            case "take over":
                drive.take_over()
            case "crash":
                drive.crashes = True
            case "stale":
                drive.write_stale_record()
            case "foreign":
                drive.write_foreign_record()
            case "seal":
                drive.seal()
            case "taken":
                drive.finish_snapshot()
            case _:
                perform(drive, number, action)
    return drive


async def log_with(drive: WrittenDriver, path: Path | None = None) -> SqliteLog:
    """Return a log with the recorded events and decisions."""
    log = SqliteLog.open(path)
    await log.append(drive.drafts)
    return log


# Histories in the form an owner writes to the log: inputs, journal, digests and snapshots

DIGEST_EVERY, SNAPSHOT_EVERY, CLAIM_EVERY = 7, 25, 40  # actions

Topics = dict[str, list[bytes]]


def written(history: Sequence[tuple[str, Any]], name: str = "history") -> Topics:
    """Return the log of a history, sealed at its end. Histories with other names have other owners."""
    drive = WrittenDriver(name=name)
    for number, action in enumerate(history):
        perform(drive, number, action)
        if number % DIGEST_EVERY == 0:
            drive.write(advance(drive.world))
        if number % SNAPSHOT_EVERY == SNAPSHOT_EVERY - 1:
            drive.seal()
            drive.finish_snapshot()
        if number % CLAIM_EVERY == CLAIM_EVERY - 1:
            drive.take_over()
    drive.seal()
    drive.finish_snapshot()
    topics: Topics = {}
    for draft in drive.drafts:
        topics.setdefault(draft.topic, []).append(draft.value)
    return topics


def read_log(topics: Mapping[str, Sequence[bytes]], read: Callable[[SqliteLog], Awaitable[T]]) -> T:
    """Return what `read` returns for a log with these topics."""

    async def run() -> T:
        with closing(SqliteLog.open(None)) as log:
            for topic, values in topics.items():
                await log.append([Draft(topic, 0, value) for value in values])
            return await read(log)

    return asyncio.run(run())


def journal_follows(topics: Mapping[str, Sequence[bytes]]) -> bool:
    """Return whether the journal follows from the events in the recorded order, checked by an independent loop."""
    world = World()
    ahead = {topic.name: deque(topics.get(topic.name, ())) for topic in INPUTS}
    expected: deque[AnyDecision] = deque()
    for offset, value in enumerate(topics[DECISIONS.name]):
        try:
            record = decode(DECISIONS, value)
        except DecodeError:
            return False
        if isinstance(record, OwnerClaimed):
            if record.previous_nonce == world.owner_nonce:
                claim(world, offset, (), record.events_version, record.owner_nonce)
            continue
        number = expected[0].seq if expected else world.seq
        if (record.owner_epoch, record.owner_nonce) != (world.owner_epoch, world.owner_nonce) or record.seq < number:
            continue
        for run in record.consumed:
            expected += open_run(world, run.now_us)
            for _ in range(run.count):
                if not ahead[run.topic]:
                    return False
                event = decode_or_none(topic_named(run.topic), ahead[run.topic].popleft())
                expected += step(world, run.topic, event, run.now_us)
        if isinstance(record, Advanced):
            if record != advance(world):
                return False
        elif isinstance(record, SnapshotTaken):
            if any(getattr(record, name) != value for name, value in world.stamp().items()):
                return False
        elif not expected or expected.popleft() != record:
            return False
    return True
