"""Parts of a snapshot about tiers: the blocks of shared stores, and the costs that ranks measured."""

from typing import Annotated

from forebay.events.base import U64_BYTES, Count, Part, require_packed
from forebay.events.metrics import TierCosts
from forebay.events.privacy import HASHES, SystemName


class StoreBlocks(Part, tag_field="type", tag="store_blocks", frozen=True, kw_only=True):
    """Blocks that one shared store has.

    Attributes:
        store: name of the shared store.
        sequence_hashes: hashes of the blocks, as packed u64.
    """

    store: SystemName
    sequence_hashes: Annotated[bytes, HASHES]

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class StoreDropped(Part, tag_field="type", tag="store_dropped", frozen=True, kw_only=True):
    """A shared store that the owner removed from the prefix index while it copied the blocks, to make room for others.

    Attributes:
        store: name of the shared store.
    """

    store: SystemName


class MeasuredCosts(Part, tag_field="type", tag="measured_costs", frozen=True, kw_only=True):
    """The newest measured costs of one (worker, rank).

    Attributes:
        costs: measured durations of loading and computing blocks.
    """

    worker_id: SystemName
    rank: Count
    costs: TierCosts
