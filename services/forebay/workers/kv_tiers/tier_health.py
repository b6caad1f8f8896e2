"""Suspend a tier that fails, so that neither requests nor writes wait for it again and again."""

import logging
from collections.abc import Sequence

from forebay import runtime

LOG = logging.getLogger(__name__)

FAILURES_MAX = 3  # consecutive failing calls until a tier is suspended; one that ran into its deadline counts as all
FIRST_S = 1.0
LONGEST_S = 60.0  # a tier that works again is noticed after this time
FAILING = frozenset({"deadline", "denied", "failed", "full"})  # other reasons are answers of a working store


class TierHealth:
    """Health of the reads or of the writes of one tier.

    After several failing calls in a row, the tier is suspended for 1 s. One further failing call then suspends it for
    twice as long, up to 60 s. The first call with a success ends this.

    Args:
        what: tier and direction, for the log: `reads from the disk tier`.
    """

    def __init__(self, what: str) -> None:
        self.suspensions = 0
        self._what = what
        self._failures = 0
        self._length_s = 0.0
        self._until_s = 0.0

    def suspended(self) -> bool:
        """Return whether the tier should not be used now."""
        return self._length_s > 0 and runtime.monotonic_s() < self._until_s

    def observe(self, results: Sequence[str]) -> None:
        """Note the results of a call, per block: an empty text or the reason of a failure."""
        if not results:
            return
        if any(reason not in FAILING for reason in results):
            if self._length_s:
                LOG.info("%s work again", self._what)
            self._failures = 0
            self._length_s = 0.0
            return
        self._failures += FAILURES_MAX if "deadline" in results else 1
        if self._failures < FAILURES_MAX or self.suspended():
            return  # calls that began before the suspension do not extend it
        self._length_s = min(LONGEST_S, self._length_s * 2 or FIRST_S)
        self._until_s = runtime.monotonic_s() + self._length_s
        self.suspensions += 1
        LOG.warning("%s fail (%s); they are suspended for %.0f s", self._what, results[0], self._length_s)
