"""Whether a worker may be sent to, and whether its process should be started anew: for whoever supervises it."""

import time

from forebay.workers.runtime.kv_metrics import kv_path
from forebay.workers.runtime.life_cycle import State
from forebay.workers.runtime.worker import Worker

LIVE_S = 30.0  # several health checks, each with its timeout


class Probes:
    """Answers from any thread; `worker` is set once there is one."""

    def __init__(self) -> None:
        self.worker: Worker | None = None

    def ready(self) -> tuple[bool, str]:
        """True while the worker is a member of the fleet and its engine answers; its state, and what moves its KV."""
        state = self._state()
        layout = None if self.worker is None else self.worker.spec.kv_layout
        return state is State.HEALTHY, state if layout is None else f"{state}, KV by {kv_path(layout)}"

    def live(self) -> tuple[bool, str]:
        """False once the worker ended, or when its event loop did not get round to a health check for long."""
        state = self._state()
        late = self._late_s()
        if late > LIVE_S:
            return False, f"{state}, no health check for {late:.0f} s"
        return state is not State.DEREGISTERED, state

    def _state(self) -> State:
        return State.CREATED if self.worker is None else self.worker.life.state

    def _late_s(self) -> float:
        """Since the last health check, where there are any: a model may load for long and hold up everything."""
        if self.worker is None or self._state() is State.CREATED:
            return 0.0
        return time.monotonic() - self.worker.health.checked_s
