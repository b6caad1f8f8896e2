"""KV blocks that the engine model loads from slower tiers before it computes a prompt, and its interface to them.

The model knows nothing about tiers. It asks its caller how many blocks can be loaded, reserves room for them, and goes
on with other sequences until the caller reports the end of the load. Loaded blocks are then cached blocks like any
other. So a sequence that could not be admitted at once loses nothing but the load if others need its blocks.
"""

from array import array
from collections.abc import Callable

from forebay.engine_model.sequence import EngineSequence
from forebay.engine_model.steps import Load

TierMatch = Callable[[str, "array[int]", int], int]
"""Return how many blocks can be loaded: `match(request_id, hashes, first)`.

`hashes` has the sequence hashes of the prompt, and of the output blocks of a preempted request. The device has the
first `first` blocks. The result counts the blocks after them. The model asks when it can admit a request, until the
answer is 0 or the load has begun. A preempted request is asked about again.
"""

OutputBlockNamed = Callable[[int, int, bytes], None]
"""Receive the hash of an output block: `named(parent, hash, token_ids)`.

`parent` is the sequence hash of the previous block. `token_ids` has the tokens of the block as packed u32; it is empty
if the engine emits no tokens. The model does not name the first block of a request, nor a block with images, videos or
sounds, because the tokens do not determine their content alone.
"""


class LoadingSequences:
    """Waiting sequences whose blocks are being loaded, in the order in which the loads began."""

    def __init__(self) -> None:
        self._by_id: dict[str, EngineSequence] = {}
        self._new: list[Load] = []  # loads that the caller has not received yet

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def has_new(self) -> bool:
        """Whether loads began that the caller has not received yet."""
        return bool(self._new)

    def begin(self, sequence: EngineSequence, blocks: int) -> None:
        """Begin to load `blocks` blocks after the held blocks of a sequence, which has room for them."""
        self._by_id[sequence.request_id] = sequence
        self._new.append(Load(sequence.request_id, sequence.attempt, sequence.held, blocks))

    def take_new(self) -> list[Load]:
        new, self._new = self._new, []
        return new

    def end(self, request_id: str) -> EngineSequence | None:
        """Remove a sequence, also from the new loads; return None if it is not loading."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is not None:
            self._new = [load for load in self._new if load.request_id != request_id]
        return sequence

    def clear(self) -> list[EngineSequence]:
        sequences = list(self._by_id.values())
        self._by_id.clear()
        self._new.clear()
        return sequences
