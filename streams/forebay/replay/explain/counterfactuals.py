"""Find the smallest changes that would have selected another worker rank in the routing decisions of a request.

The decisions are derived again from the log, starting at the newest state before them or at a given one.
"""

from collections import deque
from collections.abc import Sequence

from forebay.core.routing.plan import Plan
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.events.decisions import RequestRouted, RouteAnswered
from forebay.replay.at import JournalDiverged
from forebay.replay.explain.facts import Counterfactuals, SelectionChange
from forebay.replay.explain.find import UnknownRequest, find
from forebay.replay.explain.selection_changes import changes_of
from forebay.replay.walk import Start, Walk, before
from forebay.transport.base import Log

ROUTINGS_MAX = 64  # decisions about one request, which has few attempts at few stages


async def counterfactuals(
    log: Log,
    partition: int,
    request_id: str,
    *,
    routings: Sequence[int] = (),
    start: Start | None = None,
    custom: CustomPolicies = ONLY_BUILT_IN,
) -> list[Counterfactuals]:
    """Return the changes that would have changed each routing decision about a request, in journal order.

    Args:
        partition: control partition of the request's group.
        request_id: ID of the request on the log. Without `routings`, it may also be the ID that its client chose.
        routings: journal offsets of the decisions, as in `Explanation.routings`. By default, these are all decisions
            about the most recent request with this ID.
        start: state at or before the first of these decisions, at which the derivation begins; its world changes. None
            selects the newest usable state of the log.

    Raises:
        UnknownRequest: no such decision is about the request.
        JournalDiverged: a record does not follow from the events.
        LogError: the log is damaged, or no longer holds a state before the decisions.
    """
    if routings:
        first, last = min(routings), max(routings)
    else:
        location = await find(log, partition, request_id, thorough=False)
        request_id, first, last = location.request_id, location.first, location.last
    walk = Walk(log, partition, start or await before(log, partition, first, custom), last + 1)
    evaluated: deque[tuple[Plan, list[SelectionChange], list[str]]] = deque()

    def evaluate_plan(plan: Plan) -> None:
        if plan.request.request_id == request_id and len(evaluated) < ROUTINGS_MAX:
            evaluated.append((plan, *changes_of(walk.world, plan)))

    walk.world.on_plan = evaluate_plan
    found = []
    async for step in walk:
        if step.divergence is not None:
            raise JournalDiverged(step.divergence)
        record = step.record
        if not isinstance(record, RequestRouted | RouteAnswered) or record.request_id != request_id or not evaluated:
            continue
        plan, changes, notes = evaluated.popleft()
        if step.offset >= first and (not routings or step.offset in routings):
            worker_id, rank = plan.selected.key
            found.append(
                Counterfactuals(
                    request_id=request_id,
                    attempt=plan.attempt + 1,
                    stage=plan.stage,
                    routing_offset=step.offset,
                    selected=f"{worker_id}/{rank}",
                    changes=changes,
                    notes=notes,
                )
            )
    if not found:
        raise UnknownRequest(request_id, ())
    return found
