"""Plain data that a catalog returns. The console's HTTP endpoints return the same data as JSON.

`docs/console.md` describes the fields. Times are microseconds of Unix time, as read from the owner's clock.
"""

from typing import Literal

from forebay.replay.moment import Fact

RequestState = Literal[
    "submitted",  # not applied by an owner yet
    "queued",
    "encode",
    "prefill",
    "decode",  # also while a decode worker fetches the KV of the prompt
    "waiting",  # for another worker or the next stage
    "finished",
    "failed",
    "rejected",
    "aborted",
    "cancelled",
]
MarkerKind = Literal[
    "takeover",
    "worker_joined",
    "worker_suspect",
    "worker_draining",
    "worker_lost",
    "configuration",
    "command",
    "scaling",
    "rejections",
    "failures",
]


class CatalogState(Fact, frozen=True, kw_only=True):
    begin_us: int
    end_us: int
    begin_offset: int
    end_offset: int
    log_end_offset: int
    behind_s: float
    is_complete: bool
    error: str = ""


class RequestRow(Fact, frozen=True, kw_only=True):
    number: int
    request_id: str
    model: str
    lora_name: str
    tenant: str
    pool: str
    worker_id: str
    rank: int
    state: RequestState
    submitted_us: int
    routed_us: int | None
    first_token_us: int | None
    ended_us: int | None
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int | None
    attempt: int
    reason: str
    ttft_us: int | None
    itl_us: float | None
    journal_offset: int | None


class RequestPage(Fact, frozen=True, kw_only=True):
    """Requests that match a filter, newest first. `next_before` is `before` of the next page, null if there is none."""

    requests: list[RequestRow]
    next_before: int | None


class Marker(Fact, frozen=True, kw_only=True):
    """An event of interest. `outage_us` is the time before a takeover in which no router owned the group."""

    at_us: int
    kind: MarkerKind
    text: str
    topic: str
    offset: int
    count: int = 1
    outage_us: int = 0


class MetricSeries(Fact, frozen=True, kw_only=True):
    """Metrics over time. Each list has a value per interval, which is null for an interval without requests."""

    from_us: int
    interval_us: int
    requests_per_s: list[float]
    failed_per_s: list[float]
    ttft_p50_us: list[float | None]
    ttft_p95_us: list[float | None]
    itl_p50_us: list[float | None]
    itl_p95_us: list[float | None]
    hit_rate: list[float | None]


class WorkerActivity(Fact, frozen=True, kw_only=True):
    """Activity of a worker over the minute before a moment."""

    worker_id: str
    first_tokens: int
    hit_rate: float | None
    ttft_p50_us: float | None
