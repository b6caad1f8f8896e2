"""Count the differences between the decisions of history and of an alternative, event by event.

A second world with the alternative configuration applies history's events. In addition, each of history's decisions is
repeated under the alternative configuration on history's own state. This shows which moves do not depend on earlier
moves.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from forebay.core.routing.plan import Plan
from forebay.core.selection.counterfactual import Alternative, Counterfactual, changed_booking_fields, counterfactual
from forebay.core.state.holder_bits import HolderKey
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.core.step import AnyDecision, InputEvent
from forebay.events.base import hex_digest
from forebay.events.control import PoolConfigured
from forebay.events.decisions import (
    CostTerms,
    JournalRecord,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    RouteAnswered,
)
from forebay.events.fleet import WorkerJoined
from forebay.events.progress import RequestFailed, RequestFinished
from forebay.journal.reader import JournalReader
from forebay.replay.diff.counterfactual_world import DISAGG, CounterfactualWorld, Named, PlacementHits, names_nothing
from forebay.replay.diff.report import DecisionOutcome, DiffReport, Fork, MovedRequest, ProgressOutcome, notes
from forebay.replay.diff.tally import PairTally, Series, WorldTally, blocks_of, ranks

HISTORY, OTHER = 0, 1
RequestDecision = RequestRouted | RequestHeld | RequestRejected | RequestAborted
Key = tuple[str, str, int, str, int]  # two decisions with equal keys count as the same


@dataclass(frozen=True, slots=True)
class _FirstRoute:
    """Where a world first sent a request. The worker is empty if the world never sent the request.

    `terms` and `at_us` are of the rank that computes the prompt, and when that rank got it.
    """

    worker_id: str = ""
    rank: int = 0
    terms: CostTerms | None = None
    at_us: int = 0


@dataclass(slots=True)
class _Pair:
    """A request that at least one world has neither routed nor given up yet. `by_choice` is as in `MovedRequest`."""

    at_us: int
    prompt_tokens: int = 0
    blocks: int = 0
    by_choice: bool = False
    firsts: "list[_FirstRoute | None]" = field(default_factory=lambda: [None, None])


NEVER_ROUTED = _FirstRoute()


class Comparison:
    """Applies the events of a journal to the alternative world, and compares its decisions with history's."""

    def __init__(self, reader: JournalReader, alter: Alternative, named: Named = names_nothing) -> None:
        """Register with `reader`, which must not have begun, after a `DivergenceTrail`."""
        self.report = DiffReport(start=reader.start)
        self._alter = alter
        self._altered: dict[str, tuple[PoolConfigured, PoolConfigured]] = {}
        self._tallies = (WorldTally(), WorldTally())
        self._pairs: dict[str, _Pair] = {}
        # Until the request is routed to a decode worker.
        self._prefills: tuple[dict[str, _FirstRoute], dict[str, _FirstRoute]] = ({}, {})
        self._sums = PairTally()
        self._series: Series | None = None
        self._ranks: dict[HolderKey, None] = {}
        self._evaluated: dict[str, Counterfactual] = {}  # history's decisions at the last event
        self._sent: dict[str, tuple[array[int], str, int]] = {}  # history's requests sent since the start
        self._landed = PlacementHits()
        self._fork_key: Key | None = None
        self._outdated = reader.world.counts["stale_progress"]
        for worker in reader.world.fleet.workers():
            self._ranks |= dict.fromkeys((worker.spec.worker_id, rank) for rank in worker.spec.ranks)
        for request in reader.world.requests.queued():
            self._pair(request.submitted.request_id, request.queued_at_us)
        self._other = CounterfactualWorld(reader.world, alter, named)
        self._worlds = (reader.world, self._other.world)
        self._compare([], self._other.configure(), reader.world.now_us)
        self._previous_on_plan = reader.world.on_plan
        reader.world.on_plan = self._on_plan
        reader.followed.on_applied = self._on_applied

    def follow(self, offset: int, record: JournalRecord) -> None:
        """Count a step of the reader. The decisions on its events were compared when the reader applied the events."""
        report = self.report
        report.records += 1
        report.events += sum(run.count for run in record.consumed)
        if isinstance(record, OwnerClaimed):
            self._other.claim(offset)
        fork = report.fork
        if fork is not None and fork.offset < 0 and self._fork_key in (None, _key(record)):
            fork.offset = offset

    def finish(self) -> DiffReport:
        report, keys = self.report, sorted(self._ranks)
        history, other = self._tallies
        report.overlap, report.most = self._sums.overlap(), self._sums.most()
        held = [sum(pair.firsts[number] is None for pair in self._pairs.values()) for number in (HISTORY, OTHER)]
        report.history = history.side(keys, held[HISTORY], self._landed.share)
        report.other = other.side(keys, held[OTHER], self._other.landed.share)
        report.ranks = ranks(keys, history, other)
        report.progress = ProgressOutcome(**self._other.counts, to_come=self._other.to_come())
        report.state, report.other_state = (hex_digest(world.digest()) for world in self._worlds)
        if self._series is not None:
            report.series, report.interval_s = self._series.intervals(keys), self._series.width_us / 1e6
            report.span_s = (self._worlds[HISTORY].now_us - self._series.start_us) / 1e6
        report.identical = report.fork is None
        report.undone = sorted(self._other.undone)
        report.stages_kept |= any(path.startswith(DISAGG) for path in report.undone)
        if report.fork is not None and report.history.decisions:
            report.before_fork = report.fork.decisions_before / report.history.decisions
        report.notes = notes(report)
        return report

    def _on_plan(self, plan: Plan) -> None:
        """Repeat a decision with the alternative's configuration, right before history books it."""
        if self._previous_on_plan is not None:
            self._previous_on_plan(plan)
        pool = plan.pool
        known = self._altered.get(pool.pool)
        if known is None or known[0] is not pool:
            known = self._altered[pool.pool] = (pool, self._alter(pool))
            self.report.booked = sorted({*self.report.booked, *changed_booking_fields(*known)})
            self.report.stages_kept |= known[0].router.disagg != known[1].router.disagg
        self._evaluated[plan.request.request_id] = counterfactual(self._worlds[HISTORY], known[1], plan)

    def _on_applied(self, topic: str, event: InputEvent | None, now_us: int, decided: Sequence[AnyDecision]) -> None:
        outdated = self._worlds[HISTORY].counts["stale_progress"]
        accepted = outdated == self._outdated
        self._outdated = outdated
        match event:
            case RequestFinished() | RequestFailed() if accepted:
                sent = self._sent.pop(event.request_id, None)
                if sent is not None and isinstance(event, RequestFinished):
                    self._landed.observe(self._worlds[HISTORY], *sent)
            case WorkerJoined():
                self._ranks |= dict.fromkeys((event.spec.worker_id, rank) for rank in event.spec.ranks)
            case _:
                pass
        self._compare(decided, self._other.apply(topic, event, now_us, accepted=accepted), now_us)

    def _compare(self, decided: Sequence[AnyDecision], others: Sequence[AnyDecision], now_us: int) -> None:
        if self._series is None and now_us:
            self._series = Series(now_us)
        if not decided and not others:
            return
        if self.report.fork is None:
            self._find_fork(decided, others, now_us)
        self._compare_queries(decided, others)
        for number, decisions in enumerate((decided, others)):
            for decision in decisions:
                self._count(number, decision, now_us)
        for decision in decided:
            match decision:
                case RequestRouted():
                    self._other.sent_in_history(decision.request_id, now_us)
                case RequestAborted():
                    self._sent.pop(decision.request_id, None)
                case _:
                    pass
        self._settle({one.request_id: None for one in (*decided, *others) if isinstance(one, RequestDecision)}, now_us)
        self._evaluated.clear()

    def _find_fork(self, decided: Sequence[AnyDecision], others: Sequence[AnyDecision], now_us: int) -> None:
        ours = [decision for decision in decided if isinstance(decision, RequestDecision)]
        theirs = [decision for decision in others if isinstance(decision, RequestDecision)]
        for at, (one, other) in enumerate(zip_longest(ours, theirs)):
            if _key(one) == _key(other):
                continue
            assert self._series is not None, "a decision has a time"
            history = {key: evaluated.history for key, evaluated in self._evaluated.items()}
            self._fork_key = _key(one)
            self.report.fork = Fork(
                offset=-1,
                at_us=now_us,
                after_s=(now_us - self._series.start_us) / 1e6,
                decisions_before=self._tallies[HISTORY].summary.decisions + at,
                request_id=(one or other).request_id,
                history=_outcome(one, other, history),
                alternative=_outcome(other, one, self._other.plans),
            )
            return

    def _compare_queries(self, decided: Sequence[AnyDecision], others: Sequence[AnyDecision]) -> None:
        theirs = {answer.request_id: answer for answer in others if isinstance(answer, RouteAnswered)}
        for answer in decided:
            if isinstance(answer, RouteAnswered):
                self.report.queries += 1
                self.report.queries_otherwise += _selected(answer) != _selected(theirs[answer.request_id])

    def _count(self, number: int, decision: AnyDecision, now_us: int) -> None:
        summary = self._tallies[number].summary
        match decision:
            case RequestRouted(stage="encode"):
                pass  # not configurable; the comparison uses the rank that generates the response
            case RequestRouted(stage="prefill"):
                self._route_prefill(number, decision, now_us)
            case RequestRouted():
                self._route(number, decision, now_us)
            case RequestHeld():
                summary.held += 1
                self._pair(decision.request_id, now_us)
            case RequestRejected(reason="duplicate_id"):
                _increment(summary.rejected, "duplicate_id")  # does not concern the request that owns the ID
            case RequestRejected():
                _increment(summary.rejected, decision.reason)
                self._set_first_route(number, decision.request_id, NEVER_ROUTED, now_us)
            case RequestAborted():
                _increment(summary.aborted, decision.reason)
                self._prefills[number].pop(decision.request_id, None)
                if not decision.attempt:
                    self._set_first_route(number, decision.request_id, NEVER_ROUTED, now_us)
            case _:
                return
        summary.decisions += 1

    def _route(self, number: int, routed: RequestRouted, now_us: int) -> None:
        tally = self._tallies[number]
        request = self._request_of(number, routed)
        key = (routed.worker_id, routed.rank)
        if routed.stage == "decode":
            tally.summary.routed += 1  # it fetches the KV of the prompt
        else:
            self._count_prefill(number, routed, request, now_us)
        if routed.attempt == 1:
            if self._was_queued(number, routed) and routed.stage != "decode":
                tally.waits_us.append(routed.waited_us)
            pair = self._pair(routed.request_id, now_us)
            pair.prompt_tokens, pair.blocks = request.prompt_tokens, len(request.blocks)
        if number == HISTORY:
            self._sent[routed.request_id] = (request.blocks, *key)
            evaluated = self._evaluated[routed.request_id]
            self._count_evaluation(evaluated)
            if routed.attempt == 1:
                self._pairs[routed.request_id].by_choice = not evaluated.agrees
        if routed.attempt == 1:
            computed = self._prefills[number].pop(routed.request_id, None)
            if computed is None or routed.stage != "decode":
                computed = _FirstRoute(*key, routed.terms, now_us)
            self._set_first_route(number, routed.request_id, _FirstRoute(*key, computed.terms, computed.at_us), now_us)

    def _route_prefill(self, number: int, routed: RequestRouted, now_us: int) -> None:
        """Count a remote prefill. The comparison of the request itself uses the rank that generates the response."""
        request = self._request_of(number, routed)
        self._count_prefill(number, routed, request, now_us)
        if routed.attempt == 1:
            self._prefills[number][routed.request_id] = _FirstRoute(routed.worker_id, routed.rank, routed.terms, now_us)
            if self._was_queued(number, routed):
                self._tallies[number].waits_us.append(routed.waited_us)
        if number == HISTORY:
            self._count_evaluation(self._evaluated[routed.request_id])

    def _count_prefill(self, number: int, routed: RequestRouted, request: SubmittedRequest, now_us: int) -> None:
        """Count a prompt that a rank gets to compute, except for its cached part."""
        assert self._series is not None
        key, terms = (routed.worker_id, routed.rank), routed.terms
        block_size = self._worlds[number].pools[routed.pool].block_size
        cached_tokens = min(terms.device_overlap * block_size, request.prompt_tokens)
        self._tallies[number].route(key, terms, request.prompt_tokens, cached_tokens)
        self._series.route(number, now_us, key, request.prompt_tokens, cached_tokens)

    def _request_of(self, number: int, routed: RequestRouted) -> SubmittedRequest:
        if number == HISTORY:
            return self._evaluated[routed.request_id].history.request
        return self._other.plans[routed.request_id].request

    def _was_queued(self, number: int, routed: RequestRouted) -> bool:
        active = self._worlds[number].requests.get(routed.request_id)
        return active is not None and bool(active.queue_class)

    def _count_evaluation(self, evaluated: Counterfactual) -> None:
        moved = self.report.moved
        moved.evaluated += 1
        moved.held += evaluated.would_hold
        moved.refused += evaluated.choice is None
        moved.otherwise += evaluated.choice is not None and not evaluated.agrees

    def _settle(self, request_ids: Iterable[str], now_us: int) -> None:
        """Record which of these requests a world will no longer route.

        A request that one world rejected may be submitted again, and be a duplicate in the other world.
        """
        for request_id in request_ids:
            for number, world in enumerate(self._worlds):
                pair = self._pairs.get(request_id)
                if pair is not None and pair.firsts[number] is None:
                    request = world.requests.get(request_id)
                    if request is None or request.attempt:
                        self._set_first_route(number, request_id, NEVER_ROUTED, now_us)

    def _pair(self, request_id: str, now_us: int) -> _Pair:
        pair = self._pairs.get(request_id)
        if pair is None:
            self.report.requests += 1
            pair = self._pairs[request_id] = _Pair(now_us)
        return pair

    def _set_first_route(self, number: int, request_id: str, first: _FirstRoute, now_us: int) -> None:
        pair, tally = self._pair(request_id, now_us), self._tallies[number]
        before = pair.firsts[number]
        tally.summary.unsent -= before is not None  # rejected, then resubmitted while the other world holds it
        tally.summary.sent += first.terms is not None
        tally.summary.unsent += first.terms is None
        pair.firsts[number] = first
        one, other = pair.firsts
        if one is None or other is None:
            return
        del self._pairs[request_id]
        if one.terms is None or other.terms is None:
            self._other.counts["unknown_end"] += other.terms is not None
            return
        moved = (one.worker_id, one.rank) != (other.worker_id, other.rank)
        self.report.moved.compared += 1
        self._sums.add(one.terms, other.terms, later=other.at_us > one.at_us)
        if moved:
            self.report.moved.moved += 1
            self.report.moved.by_choice += pair.by_choice
            self._sums.move(
                MovedRequest(
                    request_id=request_id,
                    at_us=pair.at_us,
                    prompt_tokens=pair.prompt_tokens,
                    blocks=pair.blocks,
                    worker_id=one.worker_id,
                    rank=one.rank,
                    overlap=blocks_of(one.terms),
                    other_worker_id=other.worker_id,
                    other_rank=other.rank,
                    other_overlap=blocks_of(other.terms),
                    by_choice=pair.by_choice,
                )
            )


def _increment(counts: dict[str, int], reason: str) -> None:
    counts[reason] = counts.get(reason, 0) + 1


def _key(decision: AnyDecision | JournalRecord | None) -> Key | None:
    """Return a key that is equal for equal decisions about a request; None for other records."""
    match decision:
        case RequestRouted():
            return f"routed {decision.stage}", decision.request_id, decision.attempt, decision.worker_id, decision.rank
        case RequestHeld():
            return "held", decision.request_id, 0, "", 0
        case RequestRejected():
            return f"rejected {decision.reason}", decision.request_id, 0, "", 0
        case RequestAborted():
            return f"aborted {decision.reason}", decision.request_id, 0, "", 0
        case _:
            return None


def _outcome(
    decision: RequestDecision | None, beside: RequestDecision | None, plans: dict[str, Plan]
) -> DecisionOutcome:
    """Return a decision for the report, with this world's cost of the rank that the other world selected."""
    match decision:
        case RequestRouted():
            there = None
            if isinstance(beside, RequestRouted) and beside.request_id == decision.request_id:
                table = plans[decision.request_id].table
                at = table.roster.positions.get((beside.worker_id, beside.rank))
                there = None if at is None else table.terms(at)
            return DecisionOutcome(
                decision="routed",
                request_id=decision.request_id,
                attempt=decision.attempt,
                worker_id=decision.worker_id,
                rank=decision.rank,
                terms=decision.terms,
                there=there,
            )
        case RequestHeld():
            return DecisionOutcome(decision="held", request_id=decision.request_id, reason=decision.queue_class)
        case RequestRejected():
            return DecisionOutcome(decision="rejected", request_id=decision.request_id, reason=decision.reason)
        case RequestAborted():
            return DecisionOutcome(
                decision="aborted", request_id=decision.request_id, attempt=decision.attempt, reason=decision.reason
            )
        case None:
            return DecisionOutcome(decision="nothing")


def _selected(answer: RouteAnswered) -> tuple[str, int] | None:
    return None if answer.choice is None else (answer.choice.worker_id, answer.choice.rank)
