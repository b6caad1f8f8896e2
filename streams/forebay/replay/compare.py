"""Compare two moments of a group, and describe the differences in sentences."""

from typing import Literal

from forebay.replay.moment import Fact

ChangeKind = Literal["owner", "worker", "pool", "size", "requests", "queue", "load", "cache"]


class MomentSummary(Fact, frozen=True, kw_only=True):
    """Totals of a group at one moment.

    Attributes:
        offset: journal offset of the moment.
        now_us: the owner's clock, in microseconds since 1970.
        owner_id: ID of the owner; empty if unknown.
        owner_epoch: epoch of the owner.
        workers: number of workers in the fleet.
        ready: number of ready workers.
        active_requests: number of active requests, including queued requests.
        queued_requests: number of requests in the router's queues.
        prefill_tokens: uncached prompt tokens of requests that wait for their first token, over all ranks.
        decode_blocks: KV blocks of active requests, over all ranks.
        device_blocks: KV blocks cached in device memory, over all ranks.
    """

    offset: int
    now_us: int
    owner_id: str
    owner_epoch: int
    workers: int
    ready: int
    active_requests: int
    queued_requests: int
    prefill_tokens: int
    decode_blocks: float
    device_blocks: int


class MomentChange(Fact, frozen=True, kw_only=True):
    """One difference between two moments.

    Attributes:
        kind: what the difference is about. `pool` is a change of a pool's configuration, `size` a change of its number
            of workers.
        subject: the worker, `worker/rank`, pool or owner that changed; the model's name for changes of all pools.
        text: the difference as a sentence.
        before: value at the earlier moment, as text; empty if there was none.
        after: value at the later moment, as text; empty if there is none.
    """

    kind: ChangeKind
    subject: str
    text: str
    before: str
    after: str


class MomentComparison(Fact, frozen=True, kw_only=True):
    """Differences between two moments of a group.

    Attributes:
        a: totals at the earlier moment.
        b: totals at the later moment.
        changes: the most important differences, most important first.
        omitted: number of further differences, by kind.
    """

    a: MomentSummary
    b: MomentSummary
    changes: list[MomentChange]
    omitted: dict[ChangeKind, int]
