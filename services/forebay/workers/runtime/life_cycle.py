"""Life cycle of a worker as a state machine.

Theory of operation. A worker changes its state only by the transitions below. Any other transition raises
IllegalTransition and leaves the state unchanged.

    created --register--> registered --admit--> running --pass--> healthy       any member --lose--> registered
    registered, running, healthy --stop--> stopping                                any --leave--> deregistered
"""

from enum import StrEnum

from forebay import runtime
from forebay.core.state_machine import IllegalTransition

FACT_S = 5.0  # the owner polls the leases twice per second; if there is no owner, no new work arrives anyway


class State(StrEnum):
    """State of a worker process, from the start of its engine to the release of its lease."""

    CREATED = "created"  # the engine is starting
    REGISTERED = "registered"  # the lease is held; the owner may admit the worker
    RUNNING = "running"  # member of the fleet, without a health check so far
    HEALTHY = "healthy"  # member of the fleet, and a health check succeeded
    STOPPING = "stopping"  # draining its requests
    DEREGISTERED = "deregistered"  # the lease is released


class Transition(StrEnum):
    REGISTER = "register"
    ADMIT = "admit"
    PASS = "pass"  # noqa: S105 - a check is passed
    LOSE = "lose"
    STOP = "stop"
    LEAVE = "leave"


_LEAVES = {Transition.LEAVE: State.DEREGISTERED}
_ENDS = {Transition.STOP: State.STOPPING, **_LEAVES}
TRANSITIONS: dict[State, dict[Transition, State]] = {
    State.CREATED: {Transition.REGISTER: State.REGISTERED, **_LEAVES},
    State.REGISTERED: {Transition.ADMIT: State.RUNNING, **_ENDS},
    State.RUNNING: {Transition.PASS: State.HEALTHY, Transition.LOSE: State.REGISTERED, **_ENDS},
    State.HEALTHY: {Transition.LOSE: State.REGISTERED, **_ENDS},
    State.STOPPING: _LEAVES,
    State.DEREGISTERED: {},
}


class WorkerLifeCycle:
    def __init__(self) -> None:
        self.state = State.CREATED

    def move(self, move: Transition) -> None:
        """Apply a transition. Raises IllegalTransition, without any change, if `TRANSITIONS` does not allow it."""
        state = TRANSITIONS[self.state].get(move)
        if state is None:
            raise IllegalTransition(f"transition {move} is not allowed in state {self.state}")
        self.state = state


class WorkerDrain:
    """Deadlines of a worker that drains: it finishes its requests, gets no new ones, and then stops.

    Both are on the monotonic clock: `ends_s` for its requests, and `fact_ends_s` for the owner's record of the drain.
    """

    def __init__(self, within_s: float) -> None:
        now = runtime.monotonic_s()
        self.ends_s = now + within_s
        self.fact_ends_s = now + min(within_s, FACT_S)
        self.announced = False

    def left_s(self, now: float) -> float | None:
        """Return the seconds until the next of the two deadlines; None if both have passed."""
        return min((end - now for end in (self.fact_ends_s, self.ends_s) if end > now), default=None)
