"""A worker moves by its table and by nothing else."""

from itertools import product

import pytest

from forebay.core.state_machine import IllegalTransition
from forebay.workers.runtime.life_cycle import TRANSITIONS, Life, Move, State

LEGAL: dict[tuple[State, Move], State] = {
    (State.CREATED, Move.REGISTER): State.REGISTERED,
    (State.REGISTERED, Move.ADMIT): State.RUNNING,
    (State.RUNNING, Move.PASS): State.HEALTHY,
    (State.RUNNING, Move.LOSE): State.REGISTERED,
    (State.HEALTHY, Move.LOSE): State.REGISTERED,
    (State.REGISTERED, Move.STOP): State.STOPPING,
    (State.RUNNING, Move.STOP): State.STOPPING,
    (State.HEALTHY, Move.STOP): State.STOPPING,
    **{(state, Move.LEAVE): State.DEREGISTERED for state in State if state is not State.DEREGISTERED},
}


@pytest.mark.parametrize(("state", "move"), list(product(State, Move)))
def test_every_move_is_legal_or_changes_nothing(state: State, move: Move) -> None:
    life = Life()
    life.state = state
    if (state, move) in LEGAL:
        life.move(move)
        assert life.state is LEGAL[state, move]
    else:
        with pytest.raises(IllegalTransition, match=f"a worker that is {state} does not {move}"):
            life.move(move)
        assert life.state is state


def test_the_way_of_a_worker_through_its_whole_life() -> None:
    life = Life()
    seen = [life.state]
    for move in (Move.REGISTER, Move.ADMIT, Move.PASS, Move.STOP, Move.LEAVE):
        life.move(move)
        seen.append(life.state)
    assert seen == list(State)
    assert set(TRANSITIONS) == set(State)
