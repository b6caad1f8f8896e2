"""Readiness and liveness of a worker process, for its supervisor."""

from forebay import runtime
from forebay.workers.runtime.life_cycle import State
from forebay.workers.runtime.worker import Worker

LIVE_S = 30.0  # longer than several health checks with their timeouts


class Probes:
    """Readiness and liveness probes of a worker process. They can be called from any thread.

    Attributes:
        worker: the worker; None until it is created.
    """

    def __init__(self) -> None:
        self.worker: Worker | None = None

    def ready(self) -> tuple[bool, str]:
        """Return whether the worker is a healthy member of the fleet, and a text with its state and KV transport."""
        state = self._state()
        layout = None if self.worker is None else self.worker.spec.kv_layout
        return state is State.HEALTHY, state if layout is None else f"{state}, KV transport {layout.connector}"

    def live(self) -> tuple[bool, str]:
        """Return whether the worker is alive, and a text with its state.

        It is not alive once it has released its lease, or if the last health check is more than `LIVE_S` seconds ago.
        """
        state = self._state()
        late = self._late_s()
        if late > LIVE_S:
            return False, f"{state}, no health check for {late:.0f} s"
        return state is not State.DEREGISTERED, state

    def _state(self) -> State:
        return State.CREATED if self.worker is None else self.worker.life.state

    def _late_s(self) -> float:
        """Return the seconds since the last health check; 0 while the engine loads, which may block the event loop."""
        if self.worker is None or self._state() is State.CREATED:
            return 0.0
        return runtime.monotonic_s() - self.worker.health.checked_s
