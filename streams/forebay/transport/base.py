"""The two seams to the outside world: `Log`, where events travel, and `Leases`, who is alive.

Theory of operation. A log is a set of topics, each a set of partitions, each a dense sequence of
records from offset 0. An append is acknowledged when it would survive the death of this process; only
then do readers see it. Appends of one caller keep their order. Nothing here knows what a record means.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol

import msgspec


class LogError(Exception):
    """The log cannot go on; the text says what to do. After a failed append the log stays failed."""


class LogFull(LogError):
    """Too much waits for the log already. Nothing of this append was taken, and a later one may be."""


class LeaseError(Exception):
    """The leases did not answer; the text says what to check. Trying again later is right."""


class Draft(msgspec.Struct, frozen=True):
    """A record to append."""

    topic: str
    partition: int
    value: bytes
    key: bytes | None = None
    headers: Mapping[str, str] | None = None


class Record(msgspec.Struct, frozen=True):
    """A record as it stands in the log.

    Attributes:
        at_us: the wall clock of the append in microseconds, for people only; 0 when its producer did not set it.
        value: empty for a record without a value, which decodes as no event of any topic.
        headers: by name; of several with one name the last.
        fault: why there is no value to decode; None when there is one.
    """

    topic: str
    partition: int
    offset: int
    at_us: int
    value: bytes
    key: bytes | None = None
    headers: Mapping[str, str] | None = None
    fault: str | None = None


class Tail(Protocol):
    """A reader that follows one partition from an offset on."""

    def take(self, limit: int) -> list[Record]:
        """Up to `limit` next records, at once; empty when none is there yet."""

    def __len__(self) -> int:
        """Records known to be ready (at least 1 when any is)."""

    def close(self) -> None:
        """Stop following."""


class Log(Protocol):
    """An append-only log. Used from one event loop."""

    async def append(self, drafts: Sequence[Draft]) -> list[int]:
        """Append in the order given within each partition; the offsets once all are durable.

        Raises LogError when they are not, and on every later call: then the first of a partition's records may
        stand in the log and the rest not. The embedded log appends all or none.
        """

    def append_soon(self, drafts: Sequence[Draft]) -> None:
        """Append without waiting. A failure ends the log: `append` and `failure` tell."""

    def tail(self, topic: str, partition: int, offset: int, wake: "Wake") -> Tail:
        """Follow a partition from `offset`, at most its end; `wake.set()` is called whenever records become ready."""

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        """Up to `limit` records from `offset` on; fewer when they are large, none only at the end.

        Raises LogError for records that are damaged or gone.
        """

    async def begin(self, topic: str, partition: int) -> int:
        """The oldest offset that is still there; what came before, retention removed. Raises LogError."""

    async def end(self, topic: str, partition: int) -> int:
        """The offset that the next record will get. Raises LogError."""


class Wake(Protocol):
    """What a tail calls when it has something: an asyncio.Event, or anything with `set`."""

    def set(self) -> None:
        """Note that there is something to take."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease as the owner sees it: a worker's, or with the id of an ingress as `worker_id` that of an ingress.

    Attributes:
        expires_in_ms: Negative once it ran out.
        deadline_ms: Changes with every renewal. On the store's clock, which may jump.
        released: Whether its holder gave it up.
    """

    worker_id: str
    token: str
    payload: bytes
    expires_in_ms: int
    ttl_ms: Annotated[int, msgspec.Meta(ge=1)]
    deadline_ms: int = 0
    released: bool = False


class Leases(Protocol):
    """Liveness, and nothing else: no fact is ever read from here without becoming an event first."""

    def acquire(self, group: str, worker_id: str, token: str, payload: bytes, ttl_ms: int) -> None:
        """Take or replace the lease of a worker; `token` names this incarnation."""

    def renew(self, group: str, worker_id: str, token: str, ttl_ms: int) -> bool:
        """Extend the lease. False when another incarnation holds it or it is gone."""

    def release(self, group: str, worker_id: str, token: str) -> None:
        """Mark the lease as released, if this incarnation holds it. Polls show that until it is forgotten."""

    def poll(self, group: str) -> list[Lease]:
        """Every lease of the group in worker order, run-out and released ones too."""

    def forget(self, group: str, worker_id: str, token: str) -> None:
        """Drop a run-out lease after the owner wrote its fact."""

    def groups(self) -> list[str]:
        """Every group in which some lease has not run out, sorted."""

    def ask(self, group: str, ttl_ms: int) -> None:
        """Have `groups` name a group for a while, though nobody has a lease in it yet."""
