"""Reports of the tiers of a vLLM rank to its worker. They arrive with the statistics of vLLM's steps.

A report of the blocks that a request has loaded arrives with the step in which the load ends: before the first token.
"""

from collections import Counter
from typing import Any, get_origin

import msgspec

from forebay.events.metrics import TierCosts
from forebay.events.progress import OnboardedTokens
from forebay.workers.kv_tiers.metrics import TierCounters


class TierReport(msgspec.Struct, frozen=True):
    """Report of the tiers of one rank.

    Attributes:
        onboarded: tokens that were loaded since the previous report, by id of the request on the log.
    """

    onboarded: dict[str, tuple[OnboardedTokens, ...]]
    costs: TierCosts
    counters: TierCounters

    def encode(self) -> bytes:
        """Return the report as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> "TierReport":
        """Return the report in these bytes."""
        return msgspec.msgpack.decode(encoded, type=cls, dec_hook=_counter)


def _counter(kind: Any, value: Any) -> Any:
    assert get_origin(kind) is Counter
    return Counter(value)
