"""Timeline of a request that owners with different decision rules have routed.

Decisions of owners with other rules are shown as the journal records them, because only a program with these rules can
derive the reasons.
"""

from forebay.core.world import World
from forebay.events.decisions import RequestHeld, RequestRejected, RequestRouted, RouteAnswered, ScoredCandidate
from forebay.events.topics import DECISIONS
from forebay.replay.explain.explanation import ExcludedRank
from forebay.replay.explain.timeline import Timeline
from forebay.replay.explain.timeline_parts import SENT
from forebay.replay.recorded import RecordedStep


class SpanTimeline(Timeline):
    """Timeline with derived steps and with recorded ones."""

    def __init__(self, request_id: str, world: World) -> None:
        super().__init__(request_id, world)
        self._decided_by = ""  # names the rules of the owner of a recorded step

    def apply_recorded(self, step: RecordedStep, decided_by: str) -> None:
        """Apply a record of an owner with other rules, as the journal contains it. `decided_by` names the rules."""
        self._decided_by = decided_by
        self._apply_events(step.consumed, step.events, step.begins)
        if step.record is not None:
            self._apply_record(step.offset, step.record)
        self._decided_by = ""

    def continue_in(self, world: World) -> None:
        """Continue with derived steps in the world of a walk. The caller registers `on_plan`."""
        self._world = world

    def _left_out(self, record: RequestRejected | RouteAnswered) -> tuple[ExcludedRank, ...]:
        return () if self._decided_by else super()._left_out(record)

    def _hold(self, offset: int, record: RequestHeld) -> None:
        if not self._decided_by:
            super()._hold(offset, record)
            return
        text = f"held in queue class {record.queue_class}, {record.ahead} requests ahead, decided by {self._decided_by}"
        self._add_entry("held", text, self._now_us, DECISIONS.name, offset)

    def _route(self, offset: int, record: RequestRouted) -> None:
        if self._decided_by:
            self._send(offset, record, _routed_text(record, self._decided_by), self._now_us)
        else:
            super()._route(offset, record)

    def _selected_text(self, offset: int, record: RouteAnswered) -> str:
        if not self._decided_by:
            return super()._selected_text(offset, record)
        assert record.choice is not None, "an answer without a reason selects a rank"
        would = "would be held, then routed to" if record.would_wait else "would be routed to"
        choice = record.choice
        cost = f"cost {choice.terms.cost:.2f}"
        return f"{would} {choice.worker_id}/{choice.rank}: {cost}, decided by {self._decided_by}"


def _routed_text(record: RequestRouted, decided_by: str) -> str:
    """Return a sentence about a routing decision of which only the journal record is known."""
    again = f"attempt {record.attempt}, " if record.attempt > 1 else ""
    waited = f" after {record.waited_us / 1e6:.3f} s in the queue" if record.waited_us else ""
    sent = f"{again}{SENT.get(record.stage, 'routed')} to {record.worker_id}/{record.rank}{waited}"
    return (
        f"{sent}: cost {record.terms.cost:.2f}{_beside(record.runner_up, record.candidates)}, decided by {decided_by}"
    )


def _beside(runner_up: ScoredCandidate | None, candidates: int) -> str:
    among = f", {candidates} candidates" if candidates > 1 else ", the only candidate"
    if runner_up is None:
        return among
    return f"{among}, next {runner_up.worker_id}/{runner_up.rank} with {runner_up.terms.cost:.2f}"
