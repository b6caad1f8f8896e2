"""Split the time to first token into parts, by the phases the request was in (`forebay.core.phases`)."""

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
    """Time per part of one request, in microseconds of the owner's clock; retried phases add up.

    `queue` is the time in the router's queue, `wait` the time without a worker for the next stage. `prefill` and
    `decode` last from the decision to the worker's event, including log hops and the worker's own queue. `transfer` is
    what the worker reports for fetching KV, and is subtracted from `decode`. A failed fetch counts as `decode`.

    Attributes:
        phase: current phase.
        prefilled_us: when the last remote prefill ended; None if there was none.
    """

    def __init__(self, now_us: int) -> None:
        """Begin with the submission."""
        self.phase = Phase.SUBMITTED
        self.prefilled_us: int | None = None
        self._since_us = now_us
        self._spent: dict[Part, int] = {}

    def enter(self, phase: Phase, now_us: int) -> None:
        """Switch to a phase; no effect if the request is in it already."""
        if phase is not self.phase:
            self._spent = self.until(now_us)
            if self.phase is Phase.REMOTE_PREFILL:
                self.prefilled_us = now_us
            self.phase, self._since_us = phase, now_us

    def until(self, now_us: int, transfer_us: int = 0) -> dict[Part, int]:
        """Return the parts up to `now_us`.

        They sum to the elapsed time. `transfer_us` is the reported time of the fetch.
        """
        spent, last = dict(self._spent), max(0, now_us - self._since_us)
        part = PARTS[self.phase]
        spent[part] = spent.get(part, 0) + last
        if moved_us := min(transfer_us, last):
            spent[part] -= moved_us
            spent["transfer"] = moved_us
        return spent
