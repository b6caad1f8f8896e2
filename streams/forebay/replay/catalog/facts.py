"""Plain data that a catalog returns. The console's HTTP endpoints return the same data as JSON.

Times are microseconds of Unix time. `now_us` fields are readings of the owner's clock, as recorded in the journal.
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
    """How far a catalog has followed its log.

    Attributes:
        begin_us: owner's clock at the oldest moment that can be shown; 0 for a log without events.
        end_us: time of the newest event that the catalog contains; 0 for a log without events.
        begin_offset: offset of the oldest journal record that can be shown.
        end_offset: offset after the newest journal record that the catalog contains.
        log_end_offset: offset after the newest journal record of the log, when it was last read.
        behind_s: seconds by which the catalog lags behind the log, by the clocks of the two newest records.
        is_complete: whether the catalog has reached the end of the log since its process started.
        error: why the catalog cannot follow the log any further; empty while it can.
    """

    begin_us: int
    end_us: int
    begin_offset: int
    end_offset: int
    log_end_offset: int
    behind_s: float
    is_complete: bool
    error: str = ""


class RequestRow(Fact, frozen=True, kw_only=True):
    """A request, as of one moment. Times after that moment are null.

    Attributes:
        number: offset of its submission on topic `requests`, which is unique, unlike the ID.
        lora_name: name of the requested LoRA adapter; empty for the base model.
        pool: pool that serves the request; empty before the first decision.
        worker_id: worker to which the request was last routed; empty if none.
        submitted_us: when the owner applied the submission.
        queued_us: time in the router's queue.
        routed_us: when the request was first routed; null before.
        first_token_us: when the owner applied the first token; null before.
        ended_us: when the request ended; null before.
        prompt_tokens: length of the prompt in tokens.
        cached_tokens: prompt tokens that the engine found in its cache; null before the first token.
        output_tokens: output tokens; null before the end.
        attempt: number of the last attempt; 0 before the first.
        reason: finish reason, or the reason of a rejection, an abort or a failure; empty otherwise.
        ttft_us: time from the submission to the first token; null without a first token.
        itl_us: mean time between two output tokens; null with fewer than two output tokens.
        journal_offset: journal offset of the newest decision about the request; null before the first.
    """

    number: int
    request_id: str
    model: str
    lora_name: str
    pool: str
    worker_id: str
    rank: int
    state: RequestState
    submitted_us: int
    queued_us: int
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
    """Requests that match a filter, newest first.

    Attributes:
        next_before: value of `before` for the next page; null on the last page.
    """

    requests: list[RequestRow]
    next_before: int | None


class Marker(Fact, frozen=True, kw_only=True):
    """An event of interest on the time axis.

    Attributes:
        at_us: time of the event on the owner's clock.
        count: number of events, if several of one kind within a second are one marker.
    """

    at_us: int
    kind: MarkerKind
    text: str
    topic: str
    offset: int
    count: int = 1


class MetricSeries(Fact, frozen=True, kw_only=True):
    """Metrics over time. Each list has a value per interval, which is null for an interval without requests.

    Attributes:
        from_us: beginning of the first interval.
        requests_per_s: submitted requests per second.
        finished_per_s: finished requests per second.
        failed_per_s: rejected, aborted and failed requests per second.
        output_tokens_per_s: output tokens of the requests that finished in the interval, per second.
        ttft_p50_us: median TTFT of the first tokens in the interval.
        ttft_p95_us: 95th percentile of the same.
        itl_p50_us: median of the mean ITL of requests that finished in the interval.
        itl_p95_us: 95th percentile of the same.
        hit_rate: share of prompt tokens that engines found in their caches.
    """

    from_us: int
    interval_us: int
    requests_per_s: list[float]
    finished_per_s: list[float]
    failed_per_s: list[float]
    output_tokens_per_s: list[float]
    ttft_p50_us: list[float | None]
    ttft_p95_us: list[float | None]
    itl_p50_us: list[float | None]
    itl_p95_us: list[float | None]
    hit_rate: list[float | None]


class WorkerActivity(Fact, frozen=True, kw_only=True):
    """Activity of a worker over the minute before a moment.

    Attributes:
        first_tokens: number of first tokens.
        hit_rate: share of prompt tokens found in its cache; null without a first token.
        ttft_p50_us: median TTFT; null without a first token.
    """

    worker_id: str
    first_tokens: int
    hit_rate: float | None
    ttft_p50_us: float | None
