"""What the planner knows about one request in flight, and the sums over the requests of one interval."""

from dataclasses import dataclass, field
from typing import Literal

RequestStage = Literal["encode", "prefill", "generate"]
OUTPUT_MAX = (1 << 31) - 1  # highest `max_tokens` of a request


@dataclass(slots=True)
class Mean:
    """Weighted mean of durations."""

    total_us: int = 0
    count: int = 0

    def add(self, us: int, count: int = 1) -> None:
        self.total_us += us
        self.count += count

    @property
    def ms(self) -> float | None:
        return self.total_us / self.count / 1000 if self.count else None


@dataclass(slots=True)
class Latency:
    """Time to first token and inter-token latency during one interval."""

    ttft: Mean = field(default_factory=Mean)
    itl: Mean = field(default_factory=Mean)


@dataclass(slots=True)
class PoolTally:
    """Sums over the requests of one pool in one interval.

    `routed_tokens` are of prompts that a worker of the pool was sent to compute, `cached_tokens` those of them that the
    router found in the worker's cache.
    """

    requests: int = 0
    prompt_tokens: int = 0
    routed_tokens: int = 0
    cached_tokens: int = 0
    ended: int = 0
    output_tokens: int = 0
    latency: Latency = field(default_factory=Latency)


@dataclass(frozen=True, slots=True)
class Place:
    """Worker rank to which a request was routed."""

    pool: str
    worker_id: str
    rank: int


@dataclass(slots=True)
class TrackedRequest:
    """Facts about one request, from events that may arrive in any order across topics.

    Attributes:
        expires_us: when the planner forgets the request, even if no event has ended it.
        submitted_us: when its submission was read; None if it was not read, or before the first interval.
        prompt_tokens: length of its prompt; None before its submission.
        embeds: whether it requests an embedding, which has no output tokens.
        queued_in: pool in whose queue it waits; empty if it waits in none.
        place: rank that has it now; None if none has it.
        prompted: rank that computes or computed its prompt; None before.
        cached_tokens: prompt tokens that the router found in the cache of that rank.
        is_routed: whether `cached_tokens` was counted.
        computing: whether that rank has not finished the prompt.
        attempt: last attempt at the response that was routed.
        begun: last attempt at the response with a first token.
        prefilled: last remote prefill that has ended.
        first_us: when its first token was read; None before.
        grown: time and number of output tokens at the last event about its output; None if unknown.
        output_tokens: number of output tokens at its end; None before, or if it failed.
        closed: whether the owner has ended it, so that no other decision about it follows.
    """

    expires_us: int
    submitted_us: int | None = None
    prompt_tokens: int | None = None
    output_max: int = OUTPUT_MAX
    embeds: bool = False
    pools: dict[RequestStage, str] = field(default_factory=dict)
    counted: set[RequestStage] = field(default_factory=set)
    queued_in: str = ""
    place: Place | None = None
    placed_us: int = 0
    prompted: Place | None = None
    cached_tokens: int = 0
    is_routed: bool = False
    computing: bool = False
    attempt: int = 0
    begun: int = 0
    prefilled: int = 0
    first_us: int | None = None
    grown: tuple[int, int] | None = None
    output_tokens: int | None = None
    ended: bool = False
    closed: bool = False

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens that its worker must still compute; 0 if the prompt is computed or unknown."""
        return max(0, (self.prompt_tokens or 0) - self.cached_tokens) if self.computing else 0

    def assign(self, stage: RequestStage, pool: str | None) -> None:
        """Record the pool of a stage, unless it is None or another pool is known."""
        if pool is not None:
            self.pools.setdefault(stage, pool)

    def forget_times(self) -> None:
        """Forget the times of all events, because they were not read as they happened."""
        self.submitted_us = self.first_us = self.grown = None
