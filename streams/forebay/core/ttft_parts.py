"""Where the time to a request's first token went, by the phases that it was in (`forebay.core.phases`)."""

from typing import Literal

from forebay.core.phases import Phase

Part = Literal["queue", "encode", "prefill", "wait", "transfer", "decode"]
PARTS: dict[str, Part] = {
    Phase.SUBMITTED: "queue",
    Phase.QUEUED: "queue",
    Phase.ENCODE: "encode",
    Phase.REMOTE_PREFILL: "prefill",
    Phase.PREFILL: "prefill",
    Phase.WAITING: "wait",
    Phase.TRANSFER: "decode",
    Phase.DECODE: "decode",
}


class TimeByPart:
    """Adds up a request's phases, in microseconds of the owner's clock; what is tried again counts again.

    `queue` is the router's queue, `wait` that nobody was there for the next stage. `prefill` and `decode` are what
    passed from the decision to what its worker said, hops over the log and the worker's own queue included; `transfer`
    is taken out of `decode`: what the worker says that fetching took. A fetch that failed stays in `decode`.

    `prefilled_us` is when the last attempt to compute the prompt elsewhere ended, None when there was none.
    """

    def __init__(self, now_us: int) -> None:
        """Begin with the submission."""
        self.phase = Phase.SUBMITTED
        self.prefilled_us: int | None = None
        self._since_us = now_us
        self._spent: dict[Part, int] = {}

    def enter(self, phase: Phase, now_us: int) -> None:
        """The request is in this phase from now on, if it was not before."""
        if phase is not self.phase:
            self._spent = self.until(now_us)
            if self.phase is Phase.REMOTE_PREFILL:
                self.prefilled_us = now_us
            self.phase, self._since_us = phase, now_us

    def until(self, now_us: int, transfer_us: int = 0) -> dict[Part, int]:
        """The parts up to now; they add up to what passed. `transfer_us` is what the worker says, of the last phase."""
        spent, last = dict(self._spent), max(0, now_us - self._since_us)
        part = PARTS[self.phase]
        spent[part] = spent.get(part, 0) + last
        if moved_us := min(transfer_us, last):
            spent[part] -= moved_us
            spent["transfer"] = moved_us
        return spent
