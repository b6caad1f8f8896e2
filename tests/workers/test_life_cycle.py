"""A worker moves by its table and by nothing else."""

from itertools import product

import pytest

from forebay.core.state_machine import IllegalTransition
from forebay.workers.runtime.life_cycle import State, Transition, WorkerLifeCycle

LEGAL: dict[tuple[State, Transition], State] = {
    (State.CREATED, Transition.REGISTER): State.REGISTERED,
    (State.REGISTERED, Transition.ADMIT): State.RUNNING,
    (State.RUNNING, Transition.PASS): State.HEALTHY,
    (State.RUNNING, Transition.LOSE): State.REGISTERED,
    (State.HEALTHY, Transition.LOSE): State.REGISTERED,
    (State.REGISTERED, Transition.STOP): State.STOPPING,
    (State.RUNNING, Transition.STOP): State.STOPPING,
    (State.HEALTHY, Transition.STOP): State.STOPPING,
    **{(state, Transition.LEAVE): State.DEREGISTERED for state in State if state is not State.DEREGISTERED},
}


@pytest.mark.parametrize(("state", "move"), list(product(State, Transition)))
def test_transition_is_in_the_table_or_raises_unchanged(state: State, move: Transition) -> None:
    life = WorkerLifeCycle()
    life.state = state
    if (state, move) in LEGAL:
        life.move(move)
        assert life.state is LEGAL[state, move]
    else:
        with pytest.raises(IllegalTransition, match=f"transition {move} is not allowed in state {state}"):
            life.move(move)
        assert life.state is state
