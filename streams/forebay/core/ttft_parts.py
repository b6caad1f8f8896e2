"""Split the time to first token into parts, by the phases of the request (`forebay.core.phases`)."""

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
    """Time that one request has spent in each part of its TTFT, in microseconds of the owner's clock.

    `queue` is the time in the router's queue, `wait` the time without a worker for the next stage. `encode`, `prefill`
    and `decode` last from the decision to the worker's event, including hops over the log and the worker's own queue.
    `transfer` is the time that the worker reports for fetching KV, and is subtracted from `decode`. A failed fetch
    counts as `decode`. If a stage is repeated, its times add up. `prefilled_us` is the end of the last remote prefill.
    """

    def __init__(self, now_us: int) -> None:
        self.phase = Phase.SUBMITTED
        self.prefilled_us: int | None = None
        self._since_us = now_us
        self._spent: dict[Part, int] = {}

    def enter(self, phase: Phase, now_us: int) -> None:
        """Record that the request enters a phase at `now_us`. No effect if it already is in this phase."""
        if phase is not self.phase:
            self._spent = self.until(now_us)
            if self.phase is Phase.REMOTE_PREFILL:
                self.prefilled_us = now_us
            self.phase, self._since_us = phase, now_us

    def until(self, now_us: int, transfer_us: int = 0) -> dict[Part, int]:
        """Return the time per part until `now_us`, in microseconds. The sum is the time since the submission.

        The worker reported a KV transfer of `transfer_us`, which is moved from the last part to `transfer`.
        """
        spent, last = dict(self._spent), max(0, now_us - self._since_us)
        part = PARTS[self.phase]
        spent[part] = spent.get(part, 0) + last
        if moved_us := min(transfer_us, last):
            spent[part] -= moved_us
            spent["transfer"] = moved_us
        return spent
