"""The result of a comparison of history with an alternative, as `forebay replay diff --json` prints it.

History is the recorded run. The alternative is the same run under another configuration. Each has a world, which is the
state of the owner. Overlaps are the leading KV blocks of a prompt that a worker rank has, according to the world that
makes the decision.
"""

from typing import Literal

import msgspec

from forebay.events.decisions import CostTerms
from forebay.replay.verify.divergence import DivergenceReport


class DecisionOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The decision of one world at the fork. `decision` is `nothing` if only the other world made one at that event.

    `reason` is that of a rejection or abort, or the queue class of a held request.
    """

    decision: Literal["routed", "held", "rejected", "aborted", "nothing"]
    request_id: str = ""
    attempt: int = 0
    worker_id: str = ""
    rank: int = 0
    terms: CostTerms | None = None
    there: CostTerms | None = None
    reason: str = ""


class Fork(msgspec.Struct, kw_only=True):
    """The first decision that differs between history and the alternative.

    `offset` is the journal offset of history's decision, or of the record whose events led only the alternative to a
    decision. The `decisions_before` are equal in both worlds.
    """

    offset: int
    at_us: int
    after_s: float
    decisions_before: int
    request_id: str
    history: DecisionOutcome
    alternative: DecisionOutcome


class MovedRequests(msgspec.Struct, kw_only=True):
    """Numbers of requests that moved: the first attempt went to one rank in history and to another in the alternative.

    Attributes:
        compared: requests that were sent to a worker both in history and in the alternative.
        by_choice: moved requests for which the alternative selects another rank even in history's state. All other
            moved requests moved because earlier moves had changed the alternative's state.
        evaluated: routing decisions of history, including further attempts, that were repeated in history's state
            under the alternative's configuration. In `otherwise` of them the alternative selects another rank,
            in `held` it would queue the request, and in `refused` it would reject the request.
    """

    compared: int = 0
    moved: int = 0
    by_choice: int = 0
    evaluated: int = 0
    otherwise: int = 0
    held: int = 0
    refused: int = 0


class TierBlocks(msgspec.Struct, kw_only=True):
    """Number of KV blocks per cache tier; `store` are the shared stores."""

    device: int = 0
    host: int = 0
    disk: int = 0
    store: int = 0


class OverlapChange(msgspec.Struct, kw_only=True):
    """Change of the overlap over all compared requests, in blocks.

    Attributes:
        won: sum of the increases, over the requests whose overlap is larger in the alternative than in history.
        lost: sum of the decreases, over the other requests.
        later: number of requests that the alternative sent later than history did.
        later_won: blocks that these later requests gained in all tiers. Most of these blocks are of their own prompts,
            which history computed in the meantime.
    """

    won: TierBlocks = msgspec.field(default_factory=TierBlocks)
    lost: TierBlocks = msgspec.field(default_factory=TierBlocks)
    later: int = 0
    later_won: int = 0


class WorldSummary(msgspec.Struct, kw_only=True):
    """Decisions and totals of one world, history's or the alternative's.

    Attributes:
        unsent: requests that were rejected or aborted before they were sent to a worker.
        still_held: requests that were still held at the end. `sent`, `unsent` and `still_held` add up to all requests.
        cached_tokens: prompt tokens known to be in the device cache of the selected ranks.
        max_over_mean: prompt tokens to compute on the busiest rank, divided by the mean over all ranks.
        wait_ms: queueing time of held requests until they were sent, in milliseconds: mean, p50, p90, p99, max.
        landed: share of prompt blocks that the selected rank had cached when the request ended, according to the prefix
            index. Close to 1 if the recorded caches match the decisions of this world. None if no block was counted.
    """

    decisions: int = 0
    routed: int = 0
    sent: int = 0
    unsent: int = 0
    held: int = 0
    still_held: int = 0
    rejected: dict[str, int] = {}
    aborted: dict[str, int] = {}
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reuse: float = 0.0
    overlap: TierBlocks = msgspec.field(default_factory=TierBlocks)
    max_over_mean: float = 0.0
    wait_ms: dict[str, float] = {}
    landed: float | None = None


class RankRouting(msgspec.Struct, kw_only=True):
    """Attempts sent to one rank, and their prompt tokens that were not cached."""

    requests: int = 0
    computed_tokens: int = 0


class RankComparison(msgspec.Struct, kw_only=True):
    worker_id: str
    rank: int
    history: RankRouting
    alternative: RankRouting


class MovedRequest(msgspec.Struct, kw_only=True):
    """A request that the alternative sent to another rank than history.

    The ranks are the ranks that generate the response. The overlap is on the rank that computes the prompt, which may
    be a different rank, in blocks of all tiers. `by_choice` is true if the alternative selects another rank for the
    request even in history's state.
    """

    request_id: str
    at_us: int
    prompt_tokens: int
    blocks: int
    worker_id: str
    rank: int
    overlap: int
    other_worker_id: str
    other_rank: int
    other_overlap: int
    by_choice: bool

    @property
    def gain(self) -> int:
        return self.other_overlap - self.overlap


class Interval(msgspec.Struct, kw_only=True):
    """One time interval, which begins `after_s` after the start of the recording.

    `reuse` is the predicted prefix reuse; None if no prompt was routed. `max_over_mean` is as in `WorldSummary`; None
    if no rank had tokens to compute.
    """

    after_s: float
    reuse: float | None = None
    other_reuse: float | None = None
    max_over_mean: float | None = None
    other_max_over_mean: float | None = None


class ProgressOutcome(msgspec.Struct, kw_only=True):
    """Number of progress events that history accepted, by how the alternative world handled them.

    Attributes:
        in_place: events of requests that were on the same worker as in history.
        moved: events of requests on another worker than in history. The events were attributed to that worker.
        late: events of requests that were sent later than in history. The events were delayed by the same time.
        void: events that did not fit the request's state, because the alternative had to restart the request.
        other_stage: events of a stage that the request does not have here, because another worker computes its prompt.
        gone: events of requests that the alternative had rejected, aborted or finished.
        to_come: delayed events that were not due yet when the recording ended.
        unknown_end: number of requests, not events, that history rejected or aborted and the alternative did not. Their
            progress is unknown, so they count as load until their deadline.
    """

    in_place: int = 0
    moved: int = 0
    late: int = 0
    void: int = 0
    other_stage: int = 0
    gone: int = 0
    to_come: int = 0
    unknown_end: int = 0


class DiffReport(msgspec.Struct, kw_only=True):
    """Open-loop comparison of history with an alternative.

    Attributes:
        idle: requested configuration changes that have no effect.
        undone: requested configuration fields that an operator changed during the recording. The requested value takes
            precedence.
        start: journal offset at which the comparison began.
        requests: requests that arrived, or waited in the router at the start.
        before_fork: share of history's decisions before the fork.
        booked: changed fields that determine how much load a request adds to its rank. `moved.evaluated` shows their
            effect only in part, because the load in history's state was added under history's configuration.
        stages_kept: whether the alternative changes the disaggregation policy. `moved.evaluated` does not show this
            change, because a repeated decision keeps its stage.
        other_state: digest of the alternative's world at the end; `state` if both worlds and configurations are equal.
    """

    alternative: str = ""
    idle: list[str] = []
    undone: list[str] = []
    notes: list[str] = []
    start: int = 0
    records: int = 0
    events: int = 0
    span_s: float = 0.0
    requests: int = 0
    identical: bool = True
    fork: Fork | None = None
    before_fork: float = 1.0
    moved: MovedRequests = msgspec.field(default_factory=MovedRequests)
    overlap: OverlapChange = msgspec.field(default_factory=OverlapChange)
    history: WorldSummary = msgspec.field(default_factory=WorldSummary)
    other: WorldSummary = msgspec.field(default_factory=WorldSummary)
    ranks: list[RankComparison] = []
    most: list[MovedRequest] = []
    series: list[Interval] = []
    interval_s: float = 0.0
    progress: ProgressOutcome = msgspec.field(default_factory=ProgressOutcome)
    booked: list[str] = []
    stages_kept: bool = False
    queries: int = 0
    queries_otherwise: int = 0
    state: str = ""
    other_state: str = ""
    unverified: dict[str, int] = {}
    divergence: DivergenceReport | None = None


OPEN_LOOP = (
    "Open loop: the alternative receives the recorded events. KV events and load reports are those of history, "
    "whatever the alternative decides. Progress of a request counts for the worker that has it in the alternative."
)
AFTER_FORK = (
    "Everything before the fork is exact. After it, each decision assumes that the caches are as they were in history. "
    "In reality the moved requests would have filled other caches."
)


def notes(report: DiffReport) -> list[str]:
    if report.divergence is not None:
        offset = report.divergence.offset
        return [
            f"The comparison ended at journal offset {offset}: that record does not follow from the recorded events."
        ]
    if report.identical:
        same = "The alternative makes the same decisions as history: no request moves. This result is exact."
        return [same, *_undone(report), *_answers(report)]
    details = [
        *_undone(report),
        *_own_prompts(report),
        *_landed(report),
        *_by_choice(report),
        *_progress(report),
        *_answers(report),
    ]
    return [OPEN_LOOP, AFTER_FORK, *details]


def _undone(report: DiffReport) -> list[str]:
    return [
        f"An operator changed {path} during the recording; the requested value takes precedence."
        for path in report.undone
    ]


def _own_prompts(report: DiffReport) -> list[str]:
    overlap = report.overlap
    if not overlap.later_won:
        return []
    return [
        f"Sent later than in history: {overlap.later:,} requests. History computed their prompts in the meantime, so "
        f"they find {overlap.later_won:,} more blocks. Most of these blocks are their own, so they are no gain. Only "
        "a simulation shows the effect of waiting on caches."
    ]


def _landed(report: DiffReport) -> list[str]:
    here, there = report.other.landed, report.history.landed
    if here is None or there is None:
        return []
    return [
        f"Validity: when their request ended, {here:.1%} of the prompt blocks that the alternative routed were in the "
        f"selected worker's cache, according to the recorded KV events. In history it was {there:.1%}."
    ]


def _by_choice(report: DiffReport) -> list[str]:
    moved = report.moved
    if not moved.moved and not report.stages_kept:
        return []
    others = f", would hold {moved.held:,} requests" if moved.held else ""
    others += f", would reject {moved.refused:,}" if moved.refused else ""
    summary = (
        f"Of {moved.evaluated:,} decisions repeated on history's own state, the alternative selects another rank in "
        f"{moved.otherwise:,}{others}."
    )
    if report.booked:
        summary += (
            f" The effect of {', '.join(report.booked)} shows there only in part, because history booked requests "
            "under its own configuration."
        )
    if report.stages_kept:
        summary += " Each repeated decision keeps its stage, so prompts are computed where history computed them."
    if not moved.moved:
        return [summary]
    if moved.by_choice == moved.moved:
        return [f"{summary} All moved requests also move there."]
    share = f"Of the {moved.moved:,} moved requests, {moved.by_choice:,} also move there"
    why = ", or because their prompts are computed elsewhere" if report.stages_kept else ""
    return [f"{summary} {share}. The others moved as a consequence of earlier moves{why}."]


def _progress(report: DiffReport) -> list[str]:
    lines, progress = [], report.progress
    if progress.late or progress.to_come:
        late = progress.late + progress.to_come
        lines.append(
            f"{late:,} progress events were delayed, because their request was sent later than in history. A request "
            "that was sent earlier occupies its worker until its end in history."
        )
    if progress.unknown_end:
        lines.append(
            f"{progress.unknown_end:,} requests were sent to a worker only by the alternative. Their end is unknown: "
            "they count as load until their deadline."
        )
    if progress.void:
        lines.append(
            f"{progress.void:,} progress events did not fit, because a lost worker had the request in only one of the "
            "worlds."
        )
    if progress.other_stage:
        lines.append(
            f"{progress.other_stage:,} progress events were ignored: they belong to a prefill or transfer that the "
            "request does not have in the alternative."
        )
    return lines


def _answers(report: DiffReport) -> list[str]:
    if not report.queries_otherwise:
        return []
    return [f"{report.queries_otherwise:,} of {report.queries:,} route queries select another rank."]
