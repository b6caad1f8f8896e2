"""The life cycle of requests at a worker: its table, its guards and its bounds."""

from itertools import product

import pytest

from forebay.workers.runtime import request_table
from forebay.workers.runtime.request_table import (
    TRANSITIONS,
    AttemptKey,
    RequestTable,
    WorkRequest,
    WorkState,
    WorkTransition,
)

ATTEMPT = 2
PATHS: dict[WorkState, tuple[WorkTransition, ...]] = {
    WorkState.RESUMING: (),
    WorkState.RUNNING: (WorkTransition.SUBMIT,),
    WorkState.RESPONDING: (WorkTransition.SUBMIT, WorkTransition.FIRST_TOKEN),
    WorkState.KEPT: (WorkTransition.SUBMIT, WorkTransition.KEEP),
    WorkState.ENDED: (WorkTransition.END,),
}
IN_FLIGHT = (WorkState.RESUMING, WorkState.RUNNING, WorkState.RESPONDING)
SAME = (ATTEMPT,)
LATER = (ATTEMPT, ATTEMPT + 1)
LEGAL: dict[tuple[WorkState, WorkTransition], tuple[WorkState, tuple[int, ...]]] = {
    (WorkState.RESUMING, WorkTransition.SUBMIT): (WorkState.RUNNING, SAME),
    (WorkState.RUNNING, WorkTransition.FIRST_TOKEN): (WorkState.RESPONDING, SAME),
    (WorkState.RUNNING, WorkTransition.KEEP): (WorkState.KEPT, SAME),
    (WorkState.KEPT, WorkTransition.RELEASE): (WorkState.ENDED, LATER),
    (WorkState.KEPT, WorkTransition.CANCEL): (WorkState.ENDED, (ATTEMPT - 1, *LATER)),
    **{(state, WorkTransition.END): (WorkState.ENDED, SAME) for state in IN_FLIGHT},
    **{(state, WorkTransition.CANCEL): (WorkState.ENDED, LATER) for state in IN_FLIGHT},
}


def request(attempt: int = ATTEMPT, name: str = "r") -> WorkRequest:
    return WorkRequest(name, attempt, owner_epoch=1, reply_slot=0, stage="prefill")


def key(attempt: int = ATTEMPT) -> AttemptKey:
    return 0, 0, "prefill", attempt


def table_in(state: WorkState) -> tuple[RequestTable, WorkRequest]:
    table, record = RequestTable(), request()
    assert table.start(record, key(), resumes=True)
    for transition in PATHS[state]:
        assert table.move("r", transition, ATTEMPT) is record
    assert record.state is state
    return table, record


@pytest.mark.parametrize(
    ("state", "transition", "attempt"), list(product(WorkState, WorkTransition, (ATTEMPT - 1, *LATER)))
)
def test_transition_is_in_the_table_or_changes_nothing(
    state: WorkState, transition: WorkTransition, attempt: int
) -> None:
    table, record = table_in(state)
    target, attempts = LEGAL.get((state, transition), (state, ()))
    moved = table.move("r", transition, attempt)
    assert moved is (record if attempt in attempts else None)
    assert record.state is (target if attempt in attempts else state)
    assert table.get("r") is record
    assert ("r" in table.in_flight) == (record.state in IN_FLIGHT)
    assert (table.find("r", ATTEMPT) is record) == (record.state in IN_FLIGHT)
    assert table.find("r", ATTEMPT + 1) is None


def test_table_has_every_state() -> None:
    assert set(TRANSITIONS) == set(WorkState)


@pytest.mark.parametrize("state", WorkState)
def test_later_attempt_starts_in_every_state_and_no_attempt_twice(state: WorkState) -> None:
    table, _ = table_in(state)
    assert not table.start(request(), key(), resumes=False)
    later = request(ATTEMPT + 1)
    assert table.start(later, key(ATTEMPT + 1), resumes=False)
    assert later.state is WorkState.RUNNING
    assert table.get("r") is later
    assert later.prefill_attempt == ATTEMPT + 1
    assert not table.start(request(), key(), resumes=False), "it ran before"
    assert not table.start(request(ATTEMPT - 1), key(ATTEMPT - 1), resumes=False), "a later attempt is in flight"
    assert table.get("r") is later


def test_unknown_requests_are_ignored() -> None:
    table = RequestTable()
    assert table.get("r") is None
    assert all(table.move("r", transition, 1) is None for transition in WorkTransition)


def test_ended_and_kept_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_table, "KEPT_MAX", 2)
    monkeypatch.setattr(request_table, "ENDED_MAX", 2)
    table = RequestTable()
    for number in range(5):
        assert table.start(request(name=f"r{number}"), key(), resumes=False)
        table.move(f"r{number}", WorkTransition.KEEP, ATTEMPT)
    states = [None if (one := table.get(f"r{number}")) is None else one.state for number in range(5)]
    assert states == [None, WorkState.ENDED, WorkState.ENDED, WorkState.KEPT, WorkState.KEPT]
