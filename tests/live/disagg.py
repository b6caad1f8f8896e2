"""Disaggregated requests whose workers the test plays."""

from typing import Any

from forebay.events.codec import encode
from forebay.events.decisions import RequestRouted
from forebay.events.progress import AnyProgressEvent
from forebay.events.topics import PROGRESS, work_topic
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkCancelled, WorkItem
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.system import MODEL, System, until

ROLES = ("encode", "prefill", "decode")
PROMPT = list(range(34))


class IdleWorkers(System):
    """A system whose workers hold leases and do nothing; a test emits their events."""

    def join_pool(self, name: str, role: str, **offers: Any) -> None:
        self.join(name, **{"pool": role, "role": role, **offers})

    def items(self) -> list[WorkItem]:
        return [one for role in ROLES for slot in range(2) for one in self.events(work_topic(role), WorkItem, slot)]

    def cancelled(self) -> list[WorkCancelled]:
        found = [self.events(work_topic(role), WorkCancelled, slot) for role in ROLES for slot in range(2)]
        return [one for some in found for one in some]

    async def routed(self, count: int, stage: str) -> RequestRouted:
        """Wait for `count` routings and their work items; return the newest, which must be of `stage`."""
        await until(lambda: len(self.decisions(RequestRouted)) == count and len(self.items()) >= count)
        newest: RequestRouted = self.decisions(RequestRouted)[-1]
        assert newest.stage == stage
        return newest

    def item(self, routed: RequestRouted) -> WorkItem:
        found = self.events(work_topic(routed.pool), WorkItem, routed.slot)
        item: WorkItem = [one for one in found if (one.stage, one.attempt) == (routed.stage, routed.attempt)][-1]
        return item

    def emit(self, routed: RequestRouted, kind: type[AnyProgressEvent], **fields: Any) -> None:
        """Append a progress event of the routing's worker."""
        names = ("request_id", "attempt", "worker_id", "worker_epoch", "owner_epoch")
        event = kind(**{name: getattr(routed, name) for name in names}, **fields)
        self.log.append_soon([Draft(PROGRESS.name, 0, encode(PROGRESS, event))])


def prefilled_by(routed: RequestRouted, **changes: Any) -> Prefilled:
    """Return the descriptor of the KV that a prefill worker keeps."""
    fields: dict[str, Any] = {
        "worker_id": routed.worker_id,
        "worker_epoch": routed.worker_epoch,
        "model": MODEL,
        "connector": "nixl",
        "descriptor": b"there",
        "tokens": len(PROMPT),
        "lease_us": 60_000_000,
        **changes,
    }
    return Prefilled(**fields)


async def flush(log: SqliteLog) -> None:
    """Wait until every pending append is in the log."""
    await log.append([Draft("dead-letters", 0, b"after it")])
