"""Reports of a rank of vLLM to its worker about its tiers."""

import msgspec

from forebay.events.progress import OnboardedTokens
from forebay.workers.engines.vllm.tiers.rank import VllmRank


class TierReport(msgspec.Struct, frozen=True):
    """Report of the tiers of one rank since the report before it.

    Attributes:
        onboarded: tokens that were loaded, by id of the request on the log.
    """

    onboarded: dict[str, tuple[OnboardedTokens, ...]]


def report_of(rank: VllmRank) -> TierReport | None:
    """Return the report of a rank; None if there is nothing new."""
    if not rank.onboarded:
        return None
    onboarded, rank.onboarded = rank.onboarded, {}
    return TierReport(onboarded)
