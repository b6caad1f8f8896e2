"""History beside an alternative, on one walk over a recorded group: who would have gone elsewhere, and what of it.

Open loop: the alternative world gets history's own events (`forebay.replay.diff.counterfactual_world`). Beside it the
alternative decides each of history's choices in history's own state, so that its own choices can be told from the
consequences of earlier ones. History is derived and verified on the way, as always.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from forebay.core.routing.counterfactual import Alternative, Counterfactual, changed_booking_fields, counterfactual
from forebay.core.routing.router import Selection
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.holder_bits import HolderKey
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
from forebay.replay.diff.counterfactual_world import Landed, Named, OtherWorld, names_nothing
from forebay.replay.diff.handover import Handover, OfOperator
from forebay.replay.diff.notes import notes
from forebay.replay.diff.report import Fork, MovedRequest, Outcome, Progress, Report
from forebay.replay.diff.tally import PairTally, Series, WorldTally, blocks_of, ranks
from forebay.replay.verify.divergence import Trail
from forebay.replay.verify.verify import PROGRESS_EVERY, OnProgress
from forebay.replay.walk import Walk, walk_all
from forebay.transport.base import Log

HISTORY, OTHER = 0, 1
AboutRequest = RequestRouted | RequestHeld | RequestRejected | RequestAborted
Key = tuple[str, str, int, str, int]  # what two decisions must have in common to be the same


@dataclass(frozen=True, slots=True)
class _First:
    """Where a world first sent a request; the worker is empty if it never did.

    `terms` are of who computes its prompt, which got it at `at_us`.
    """

    worker_id: str = ""
    rank: int = 0
    terms: CostTerms | None = None
    at_us: int = 0


@dataclass(slots=True)
class _Pair:
    """A request until both worlds sent it somewhere or gave it up. `by_choice` is as in `Moved`."""

    at_us: int
    prompt_tokens: int = 0
    blocks: int = 0
    by_choice: bool = False
    firsts: "list[_First | None]" = field(default_factory=lambda: [None, None])


NOWHERE = _First()


async def diff(
    log: Log,
    partition: int,
    alter: Alternative,
    progress: OnProgress | None = None,
    handover: Handover | None = None,
    named: Named = names_nothing,
) -> Report:
    """Compare the recorded history of a group with the same under `alter`ed configurations of its pools.

    What is `named` of `router.disagg` wins over what an operator set by hand, also where `alter` leaves it.
    A `handover` is filled with what a simulator needs to go on at the fork.
    `progress` is called now and then with the journal records done, their total, and the decisions verified. A record
    that the events do not lead to ends the comparison, and stands in the report.

    Raises:
        OtherRules: the journal was decided by another version of the rules.
        LogError: the log is damaged or misses a part that the journal says was applied.
    """
    walk = await walk_all(log, partition)
    trail = Trail(walk)
    comparison = Comparison(walk, alter, handover, named)
    report, verified = comparison.report, 0
    async for step in walk:
        if step.divergence is not None:
            report.divergence = await trail.told(log, partition, step.divergence, step)
            break
        trail.passed(step)
        comparison.follow(step.offset, step.record)
        verified += isinstance(step.record, AnyDecision)
        if progress is not None and report.records % PROGRESS_EVERY == 0:
            progress(step.offset + 1, walk.end, verified)
    report.unverified = walk.unverified
    return comparison.finish()


class Comparison:
    """Looks on while a walk derives history, and leads the alternative world beside it."""

    def __init__(self, walk: Walk, alter: Alternative, handover: Handover | None, named: Named = names_nothing) -> None:
        """Begin before the first step of the walk."""
        self.report = Report(start=walk.start)
        self._worlds = (walk.world, walk.world)
        self._alter = alter
        self._handover = handover
        self._altered: dict[str, tuple[PoolConfigured, PoolConfigured]] = {}
        self._tallies = (WorldTally(), WorldTally())
        self._pairs: dict[str, _Pair] = {}
        self._prefills: tuple[dict[str, _First], dict[str, _First]] = ({}, {})  # until there is somewhere to answer
        self._sums = PairTally()
        self._series: Series | None = None
        self._ranks: dict[HolderKey, None] = {}
        self._chosen: dict[str, tuple[ActiveRequest, Counterfactual]] = {}  # by history, at the last event
        self._sent: dict[str, tuple[array[int], str, int]] = {}  # history's requests that were sent since the start
        self._landed = Landed()
        self._outdated = walk.world.counts["outdated_progress"]
        self._fork_key: Key | None = None
        for worker in walk.world.fleet.workers():
            self._ranks |= dict.fromkeys((worker.spec.worker_id, rank) for rank in worker.spec.ranks)
        for request in walk.world.requests.queued():
            self._pair(request.request_id, request.queued_at_us)
        self._other = OtherWorld(walk.world, alter, named)
        self._worlds = (walk.world, self._other.world)
        self._together([], self._other.configure(), walk.world.now_us)
        if handover is not None and self.report.fork is not None:
            self._hand_over(handover, None, walk.world.now_us, forked=False)
        self._told_before = walk.world.on_selection
        walk.world.on_selection = self._on_selection
        walk.followed.on_applied = self._on_applied

    def follow(self, offset: int, record: JournalRecord) -> None:
        """The walk made a step; its events were compared on the way."""
        report = self.report
        report.records += 1
        report.events += sum(run.count for run in record.consumed)
        if isinstance(record, OwnerClaimed):
            self._other.claim(offset)
        fork = report.fork
        if fork is not None and fork.offset < 0 and self._fork_key in (None, _key(record)):
            fork.offset = offset

    def finish(self) -> Report:
        """The report of what was walked."""
        report, keys = self.report, sorted(self._ranks)
        history, other = self._tallies
        report.overlap, report.pairs = self._sums.overlap(), self._sums.pairs()
        report.most, report.bin_blocks = self._sums.most(), self._sums.bin_blocks
        undecided = [sum(pair.firsts[number] is None for pair in self._pairs.values()) for number in (HISTORY, OTHER)]
        report.history = history.side(keys, undecided[HISTORY], self._landed.share)
        report.other = other.side(keys, undecided[OTHER], self._other.landed.share)
        report.ranks = ranks(keys, history, other)
        report.progress = Progress(**self._other.counts, to_come=self._other.to_come())
        report.state, report.other_state = (hex_digest(world.digest()) for world in self._worlds)
        if self._series is not None:
            report.series, report.interval_s = self._series.intervals(keys), self._series.width_us / 1e6
            report.span_s = (self._worlds[HISTORY].now_us - self._series.start_us) / 1e6
        report.identical = report.fork is None
        report.undone = sorted(self._other.undone)
        report.stages_kept |= bool(report.undone)
        if report.fork is not None and history.decisions:
            report.before_fork = report.fork.decisions_before / history.decisions
        report.notes = notes(report)
        return report

    def _on_selection(self, pool: PoolConfigured, request: ActiveRequest, choice: Selection) -> None:
        """History is about to book a choice: what would the alternative choose, here and now?"""
        if self._told_before is not None:
            self._told_before(pool, request, choice)
        known = self._altered.get(pool.pool)
        if known is None or known[0] is not pool:
            known = self._altered[pool.pool] = (pool, self._alter(pool))
            self.report.booked = sorted({*self.report.booked, *changed_booking_fields(*known)})
            self.report.stages_kept |= known[0].router.disagg != known[1].router.disagg
        asked = counterfactual(self._worlds[HISTORY], known[1], request, choice)
        self._chosen[request.request_id] = (request, asked)

    def _on_applied(self, topic: str, event: InputEvent | None, now_us: int, decided: Sequence[AnyDecision]) -> None:
        """History's world has applied an event: now the other one does."""
        outdated = self._worlds[HISTORY].counts["outdated_progress"]
        heard = outdated == self._outdated
        self._outdated = outdated
        match event:
            case RequestFinished() | RequestFailed() if heard:
                sent = self._sent.pop(event.request_id, None)
                if sent is not None and isinstance(event, RequestFinished):
                    self._landed.look(self._worlds[HISTORY], *sent)
            case WorkerJoined():
                self._ranks |= dict.fromkeys((event.spec.worker_id, rank) for rank in event.spec.ranks)
            case _:
                pass
        forked = self.report.fork is not None
        self._together(decided, self._other.apply(topic, event, now_us, heard=heard), now_us)
        if self._handover is not None and self.report.fork is not None:
            self._hand_over(self._handover, event, now_us, forked=forked)
            self._handover.look(event, now_us, decided, heard=heard)

    def _hand_over(self, handover: Handover, event: InputEvent | None, now_us: int, *, forked: bool) -> None:
        """The state where the worlds part, and what operators say later."""
        if not forked:
            handover.begin(*self._worlds, event, now_us)
        elif isinstance(event, OfOperator) and self._other.said is not None:
            handover.configure((event, self._other.said), now_us)

    def _together(self, decided: Sequence[AnyDecision], others: Sequence[AnyDecision], now_us: int) -> None:
        """What both worlds decided at one event."""
        if self._series is None and now_us:
            self._series = Series(now_us)
        if not decided and not others:
            return
        if self.report.fork is None:
            self._find_fork(decided, others, now_us)
        self._answers(decided, others)
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
        self._settle({one.request_id: None for one in (*decided, *others) if isinstance(one, AboutRequest)}, now_us)
        self._chosen.clear()

    def _find_fork(self, decided: Sequence[AnyDecision], others: Sequence[AnyDecision], now_us: int) -> None:
        ours = [decision for decision in decided if isinstance(decision, AboutRequest)]
        theirs = [decision for decision in others if isinstance(decision, AboutRequest)]
        for at, (one, other) in enumerate(zip_longest(ours, theirs)):
            if _key(one) == _key(other):
                continue
            assert self._series is not None, "a decision has a time"
            history = {key: asked.history for key, (_, asked) in self._chosen.items()}
            chosen = {key: choice for key, (_, choice) in self._other.choices.items()}
            self._fork_key = _key(one)
            self.report.fork = Fork(
                offset=-1,
                at_us=now_us,
                after_s=(now_us - self._series.start_us) / 1e6,
                decisions_before=self._tallies[HISTORY].decisions + at,
                request_id=(one or other).request_id,
                history=_outcome(one, other, history),
                alternative=_outcome(other, one, chosen),
            )
            return

    def _answers(self, decided: Sequence[AnyDecision], others: Sequence[AnyDecision]) -> None:
        """Questions leave nothing behind: the same event is a question in both worlds."""
        theirs = {answer.request_id: answer for answer in others if isinstance(answer, RouteAnswered)}
        for answer in decided:
            if isinstance(answer, RouteAnswered):
                self.report.queries += 1
                self.report.queries_otherwise += _seat(answer) != _seat(theirs[answer.request_id])

    def _count(self, number: int, decision: AnyDecision, now_us: int) -> None:
        tally = self._tallies[number]
        match decision:
            case RequestRouted(stage="encode"):
                pass  # no configuration changes it: what is compared is who answers
            case RequestRouted(stage="prefill"):
                self._route_prefill(number, decision, now_us)
            case RequestRouted():
                self._route(number, decision, now_us)
            case RequestHeld():
                assert self._series is not None
                tally.held += 1
                self._series.hold(number, now_us)
                self._pair(decision.request_id, now_us)
            case RequestRejected(reason="duplicate_id"):
                tally.rejected["duplicate_id"] += 1  # it says nothing of the request that has the id
            case RequestRejected():
                tally.rejected[decision.reason] += 1
                self._first(number, decision.request_id, NOWHERE, now_us)
            case RequestAborted():
                tally.aborted[decision.reason] += 1
                self._prefills[number].pop(decision.request_id, None)
                if not decision.attempt:
                    self._first(number, decision.request_id, NOWHERE, now_us)
            case _:
                return
        tally.decisions += 1

    def _route(self, number: int, routed: RequestRouted, now_us: int) -> None:
        assert self._series is not None
        tally = self._tallies[number]
        request = self._asked(number, routed)
        key = (routed.worker_id, routed.rank)
        if routed.stage == "decode":
            tally.fetch()
        else:
            self._computes(number, routed, request, now_us)
        if routed.attempt == 1:
            if request.queue_class and routed.stage != "decode":
                tally.waits_us.append(routed.waited_us)
            pair = self._pair(routed.request_id, now_us)
            pair.prompt_tokens, pair.blocks = request.prompt_tokens, len(request.blocks)
        if number == HISTORY:
            self._sent[routed.request_id] = (request.blocks, *key)
            asked = self._chosen[routed.request_id][1]
            self._ask(asked)
            if routed.attempt == 1:
                self._pairs[routed.request_id].by_choice = not asked.agrees
        if routed.attempt == 1:
            computed = self._prefills[number].pop(routed.request_id, None)
            if computed is None or routed.stage != "decode":
                computed = _First(*key, routed.terms, now_us)
            self._first(number, routed.request_id, _First(*key, computed.terms, computed.at_us), now_us)

    def _route_prefill(self, number: int, routed: RequestRouted, now_us: int) -> None:
        """A prompt is computed there; what is compared of its request is who answers."""
        request = self._asked(number, routed)
        self._computes(number, routed, request, now_us)
        if routed.attempt == 1:
            self._prefills[number][routed.request_id] = _First(routed.worker_id, routed.rank, routed.terms, now_us)
            if request.queue_class:
                self._tallies[number].waits_us.append(routed.waited_us)
        if number == HISTORY:
            self._ask(self._chosen[routed.request_id][1])

    def _computes(self, number: int, routed: RequestRouted, request: ActiveRequest, now_us: int) -> None:
        """A rank gets a prompt to compute, as far as it is not in its cache."""
        assert self._series is not None
        key, terms = (routed.worker_id, routed.rank), routed.terms
        block_size = self._worlds[number].pools[routed.pool].block_size
        cached_tokens = min(terms.device_overlap * block_size, request.prompt_tokens)
        self._tallies[number].route(key, terms, request.prompt_tokens, cached_tokens)
        self._series.route(number, now_us, key, request.prompt_tokens, cached_tokens)

    def _asked(self, number: int, routed: RequestRouted) -> ActiveRequest:
        return (self._chosen if number == HISTORY else self._other.choices)[routed.request_id][0]

    def _ask(self, asked: Counterfactual) -> None:
        """What the alternative would have chosen where history chose."""
        moved = self.report.moved
        moved.asked += 1
        moved.held += asked.would_hold
        moved.refused += asked.choice is None
        moved.otherwise += asked.choice is not None and not asked.agrees

    def _settle(self, request_ids: Iterable[str], now_us: int) -> None:
        """Wait only for who waits: what one world refused may come again, and be a duplicate in the other."""
        for request_id in request_ids:
            for number, world in enumerate(self._worlds):
                pair = self._pairs.get(request_id)
                if pair is not None and pair.firsts[number] is None:
                    request = world.requests.get(request_id)
                    if request is None or request.attempt:
                        self._first(number, request_id, NOWHERE, now_us)

    def _pair(self, request_id: str, now_us: int) -> _Pair:
        pair = self._pairs.get(request_id)
        if pair is None:
            self.report.requests += 1
            pair = self._pairs[request_id] = _Pair(now_us)
        return pair

    def _first(self, number: int, request_id: str, first: _First, now_us: int) -> None:
        """A world sent a request somewhere for the first time, or nowhere."""
        pair, tally = self._pair(request_id, now_us), self._tallies[number]
        before = pair.firsts[number]
        tally.unsent -= before is not None  # refused, and asked for again under its id while the other world holds it
        tally.sent += first.terms is not None
        tally.unsent += first.terms is None
        pair.firsts[number] = first
        one, other = pair.firsts
        if one is None or other is None:
            return
        del self._pairs[request_id]
        if one.terms is None or other.terms is None:
            self._other.counts["unknown_end"] += other.terms is not None
            return
        assert self._series is not None
        moved = (one.worker_id, one.rank) != (other.worker_id, other.rank)
        self.report.moved.compared += 1
        self._series.compare(pair.at_us, moved=moved)
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


def _key(decision: AnyDecision | JournalRecord | None) -> Key | None:
    """What makes a decision about a request the same as another; None for others."""
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


def _outcome(decision: AboutRequest | None, beside: AboutRequest | None, choices: dict[str, Selection]) -> Outcome:
    """A decision for the report, with what its world thought of the rank that was chosen beside it."""
    match decision:
        case RequestRouted():
            there = None
            if isinstance(beside, RequestRouted) and beside.request_id == decision.request_id:
                table = choices[decision.request_id].table
                at = table.roster.positions.get((beside.worker_id, beside.rank))
                there = None if at is None else table.terms(at)
            return Outcome(
                decision="routed",
                request_id=decision.request_id,
                attempt=decision.attempt,
                worker_id=decision.worker_id,
                rank=decision.rank,
                terms=decision.terms,
                there=there,
            )
        case RequestHeld():
            return Outcome(decision="held", request_id=decision.request_id, reason=decision.queue_class)
        case RequestRejected():
            return Outcome(decision="rejected", request_id=decision.request_id, reason=decision.reason)
        case RequestAborted():
            return Outcome(
                decision="aborted", request_id=decision.request_id, attempt=decision.attempt, reason=decision.reason
            )
        case None:
            return Outcome(decision="nothing")


def _seat(answer: RouteAnswered) -> tuple[str, int] | None:
    return None if answer.choice is None else (answer.choice.worker_id, answer.choice.rank)
