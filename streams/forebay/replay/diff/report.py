"""What a comparison of history with an alternative found: plain data, as `forebay replay diff --json` prints it.

Blocks are leading KV blocks of a prompt that a worker rank is known to have, as each world saw it when it decided.
"""

from typing import Literal

import msgspec

from forebay.events.decisions import CostTerms
from forebay.replay.verify.divergence import Told


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision about a request, or none.

    Attributes:
        decision: what was decided; `nothing` where the other world decided something at that moment.
        terms: the cost of the chosen rank, by this world's own table.
        there: the cost of the rank that the other world chose, by this world's own table, where it was a candidate.
        reason: why it was refused or given up, or the class of the queue that it was held in.
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
    """The first decision that differs.

    Attributes:
        offset: the journal record of history's decision, or the one whose events led the alternative to one of its own.
        at_us: the owner's clock.
        after_s: seconds from the start of the recording.
        decisions_before: how many of history's decisions the alternative had made, too.
    """

    offset: int
    at_us: int
    after_s: float
    decisions_before: int
    request_id: str
    history: Outcome
    alternative: Outcome


class Moved(msgspec.Struct, kw_only=True):
    """Requests whose first attempt went to another rank.

    Attributes:
        compared: requests that both worlds sent somewhere.
        moved: of these, how many went to different ranks.
        by_choice: of the moved ones, how many the alternative would also have sent elsewhere in history's own state;
            the others moved because of what had moved before.
        asked: choices of history's for which the alternative was asked in history's own state, further attempts too.
        otherwise: of these, how many it would have made otherwise.
        held: of these, how many requests it would have let wait.
        refused: of these, how many requests it would have refused.
    """

    compared: int = 0
    moved: int = 0
    by_choice: int = 0
    asked: int = 0
    otherwise: int = 0
    held: int = 0
    refused: int = 0


class Tiers(msgspec.Struct, kw_only=True):
    """KV blocks by the tier of the cache."""

    device: int = 0
    host: int = 0
    disk: int = 0


class Overlap(msgspec.Struct, kw_only=True):
    """Over all compared requests: blocks found more (`won`) or less (`lost`) than in history, each summed by itself.

    `later` requests were sent later than in history, which computed their prompts meanwhile: what these found more, in
    any tier, is `later_won`, and most of it is their own.
    """

    won: Tiers = msgspec.field(default_factory=Tiers)
    lost: Tiers = msgspec.field(default_factory=Tiers)
    later: int = 0
    later_won: int = 0


class Waited(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests waited at most `below_ms`, and more than half of that."""

    below_ms: int
    requests: int


class Side(msgspec.Struct, kw_only=True):
    """What one world did.

    Attributes:
        decisions: about requests, of any kind.
        routed: attempts sent to workers, further ones too.
        sent: requests that were sent to a worker, `unsent` those refused or given up before; with those `still_held` at
            the end they are all requests.
        held: requests that waited in the router.
        rejected: requests refused, by reason; `aborted` those given up.
        prompt_tokens: of all attempts; `cached_tokens` what their ranks were known to have on the device.
        reuse: the second as a share of the first: predicted prefix reuse.
        overlap: blocks found, summed over all attempts.
        max_over_mean: of the prompt tokens to compute, the busiest rank's over the mean of all ranks.
        wait_ms: of requests that were held, how long until they were sent: mean, p50, p90, p99, max.
        waits: the same by powers of two.
        landed: share of prompt blocks that the index held where the request had been sent, when it ended: near 1
            where the caches are those that these decisions make.
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
    overlap: Tiers = msgspec.field(default_factory=Tiers)
    max_over_mean: float = 0.0
    wait_ms: dict[str, float] = {}
    waits: list[Waited] = []
    landed: float | None = None


class RankLoad(msgspec.Struct, kw_only=True):
    """Attempts sent to a rank, and their prompt tokens: all, and those to compute."""

    requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0


class Rank(msgspec.Struct, kw_only=True):
    """One worker rank in both worlds."""

    worker_id: str
    rank: int
    history: RankLoad
    alternative: RankLoad


class MovedRequest(msgspec.Struct, kw_only=True):
    """A request that went to another rank, and the blocks of all tiers that each world knew its prompt would find.

    The ranks are who answers; blocks are found by who computes the prompt, which may be another.
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
        """Blocks won, below zero if lost."""
        return self.other_overlap - self.overlap


class Interval(msgspec.Struct, kw_only=True):
    """One stretch of the recording, by the time at which a request was first decided on.

    `max_over_mean` are as in `Side`, over this interval alone; None where nobody had anything to compute.
    """

    after_s: float
    compared: int = 0
    moved: int = 0
    reuse: float | None = None
    other_reuse: float | None = None
    max_over_mean: float | None = None
    other_max_over_mean: float | None = None
    held: int = 0
    other_held: int = 0


class OverlapPair(msgspec.Struct, frozen=True, kw_only=True):
    """How many compared requests found `history` blocks in history and `alternative` blocks in the alternative."""

    history: int
    alternative: int
    requests: int


class Progress(msgspec.Struct, kw_only=True):
    """What became of the workers' progress events that history took, in the alternative world.

    Attributes:
        in_place: the request was on the same worker there.
        moved: it was on another worker, and the event was taken as said by that one.
        late: the request was sent later there, and the event came as much later.
        void: it did not fit any more: the alternative had to begin the request again.
        other_stage: it was of a stage that the request is not at there: where its prompt is computed is another.
        gone: the alternative had refused the request, given it up, or ended it.
        to_come: late ones that had not come when the recording ended.
        unknown_end: requests that history refused or gave up and the alternative did not: no progress of theirs is
            known, so that they are load there until their deadline.
    """

    in_place: int = 0
    moved: int = 0
    late: int = 0
    void: int = 0
    other_stage: int = 0
    gone: int = 0
    to_come: int = 0
    unknown_end: int = 0


class Report(msgspec.Struct, kw_only=True):
    """History and an alternative on one walk, open loop.

    Attributes:
        alternative: what is different, as it was asked for; `idle` are parts of it that change nothing.
        undone: fields of it that are as they were configured, but that an operator had set otherwise: it wins.
        notes: what these figures mean and where they stop being valid, for people.
        start: the journal offset at which the walk began.
        records: journal records followed, `events` the input events applied to each world.
        span_s: from the first to the last clock reading.
        requests: that came, or waited in the router at the start.
        identical: whether both worlds decided the same all the way.
        fork: where they did not for the first time; everything before is exact.
        before_fork: share of history's decisions before it.
        pairs: `overlap` request by request, in bins of `bin_blocks`.
        most: the moved requests with the most blocks won or lost.
        booked: changed fields that show in history's own state only in part: what they decide was booked by history.
        stages_kept: whether the alternative changes which prompts are computed elsewhere, which does not show in
            history's own state: each choice there keeps its stage.
        queries: questions that were answered; `queries_otherwise` those that the alternative answers with another rank.
        state: digests of both worlds at the end; they are equal when nothing differs, the configuration included.
        unverified: as in a verification, what could not be verified, by name.
        divergence: the first journal record that the events do not lead to, which ended the walk; None for none.
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
    moved: Moved = msgspec.field(default_factory=Moved)
    overlap: Overlap = msgspec.field(default_factory=Overlap)
    history: Side = msgspec.field(default_factory=Side)
    other: Side = msgspec.field(default_factory=Side)
    ranks: list[Rank] = []
    most: list[MovedRequest] = []
    series: list[Interval] = []
    interval_s: float = 0.0
    pairs: list[OverlapPair] = []
    bin_blocks: int = 1
    progress: Progress = msgspec.field(default_factory=Progress)
    booked: list[str] = []
    stages_kept: bool = False
    queries: int = 0
    queries_otherwise: int = 0
    state: str = ""
    other_state: str = ""
    unverified: dict[str, int] = {}
    divergence: Told | None = None
