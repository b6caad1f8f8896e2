"""The life of a worker: where it is, and where it may go from there.

Theory of operation. A worker moves by the table below and by nothing else; a move that the table does not list raises
and changes nothing.

    created --register--> registered --admit--> running --pass--> healthy       any member --lose--> registered
    registered, running, healthy --stop--> stopping                                any --leave--> deregistered
"""

import time
from enum import StrEnum

from forebay.core.state_machine import IllegalTransition

FACT_S = 5.0  # an owner looks at the leases twice a second; without one nothing new comes anyway


class State(StrEnum):
    """Where a worker is."""

    CREATED = "created"  # its engine starts
    REGISTERED = "registered"  # its lease is taken: the owner may admit it
    RUNNING = "running"  # a member of the fleet, whose engine was not asked yet
    HEALTHY = "healthy"  # a member, whose engine answered
    STOPPING = "stopping"  # it finishes what it has
    DEREGISTERED = "deregistered"  # its lease is given up


class Move(StrEnum):
    """What happens to a worker."""

    REGISTER = "register"
    ADMIT = "admit"
    PASS = "pass"  # noqa: S105 - a check is passed
    LOSE = "lose"
    STOP = "stop"
    LEAVE = "leave"


TRANSITIONS: dict[State, dict[Move, State]] = {
    State.CREATED: {Move.REGISTER: State.REGISTERED, Move.LEAVE: State.DEREGISTERED},
    State.REGISTERED: {Move.ADMIT: State.RUNNING, Move.STOP: State.STOPPING, Move.LEAVE: State.DEREGISTERED},
    State.RUNNING: {
        Move.PASS: State.HEALTHY,
        Move.LOSE: State.REGISTERED,
        Move.STOP: State.STOPPING,
        Move.LEAVE: State.DEREGISTERED,
    },
    State.HEALTHY: {Move.LOSE: State.REGISTERED, Move.STOP: State.STOPPING, Move.LEAVE: State.DEREGISTERED},
    State.STOPPING: {Move.LEAVE: State.DEREGISTERED},
    State.DEREGISTERED: {},
}


class Life:
    """Where one worker is."""

    def __init__(self) -> None:
        self.state = State.CREATED

    def move(self, move: Move) -> None:
        """Go where the table says. Raises IllegalTransition, and then stays."""
        state = TRANSITIONS[self.state].get(move)
        if state is None:
            raise IllegalTransition(f"a worker that is {self.state} does not {move}")
        self.state = state


class Drain:
    """A stop that waits for what is under way until `ends_s`, on the monotonic clock.

    `announced` once the owner knows of it; it is waited for until `fact_ends_s`.
    """

    def __init__(self, within_s: float) -> None:
        now = time.monotonic()
        self.ends_s = now + within_s
        self.fact_ends_s = now + min(within_s, FACT_S)
        self.announced = False

    def left_s(self, now: float) -> float | None:
        """Until the next of both; None when they are over."""
        return min((end - now for end in (self.fact_ends_s, self.ends_s) if end > now), default=None)
