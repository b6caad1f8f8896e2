"""Decoding sequences of the engine model, and the iteration at which each of them must be checked again.

A sequence must be checked when its last block is full or it has generated its last token.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from forebay.engine_model.sequence import EngineSequence


class JoiningSequences(NamedTuple):
    """Sequences that start to decode in the current iteration, because their KV was fetched."""

    sequences: int
    blocks: int  # number of KV blocks that they use


NO_SEQUENCES: Sequence[EngineSequence] = ()
NONE_JOINING = JoiningSequences(0, 0)


class DecodingBatch:
    """The sequences that decode one token each per iteration. `by_turn` has the oldest first.

    `blocks` is the number of KV blocks that they use; a shared block counts once per sequence.
    """

    def __init__(self) -> None:
        self.by_turn: dict[int, EngineSequence] = {}
        self.blocks = 0
        self._turns = 0
        self._due: dict[int, dict[int, EngineSequence]] = {}  # by iteration, then by turn
        self._iterations: list[int] = []  # heap of iterations in `_due`, possibly with stale ones

    def add(self, sequence: EngineSequence) -> None:
        """Add a sequence. It counts as the newest."""
        sequence.turn = self._turns
        self._turns += 1
        self.by_turn[sequence.turn] = sequence
        self.blocks += sequence.blocks

    def remove(self, sequence: EngineSequence) -> None:
        """Remove a sequence that stops decoding. Call this before its blocks are freed."""
        del self.by_turn[sequence.turn]
        self.blocks -= sequence.blocks
        others = self._due.get(sequence.due)
        if others is not None and others.pop(sequence.turn, None) is not None and not others:
            del self._due[sequence.due]

    def newest(self) -> EngineSequence:
        return self.by_turn[next(reversed(self.by_turn))]

    def look_at(self, sequence: EngineSequence, iteration: int) -> None:
        """Schedule the next check of a sequence: `take_due` will return it at `iteration`."""
        sequence.due = iteration
        others = self._due.get(iteration)
        if others is None:
            self._due[iteration] = {sequence.turn: sequence}
            heappush(self._iterations, iteration)
        else:
            others[sequence.turn] = sequence

    def next_due(self) -> int:
        """Return the first iteration with a scheduled check. There must be one."""
        while self._iterations[0] not in self._due:
            heappop(self._iterations)
        return self._iterations[0]

    def take_due(self, iteration: int) -> Sequence[EngineSequence]:
        """Return the sequences to check at `iteration`, oldest first, and remove these checks from the schedule.

        The caller must not skip an iteration that has a check.
        """
        iterations = self._iterations
        while iterations and iterations[0] <= iteration:
            heappop(iterations)
        due = self._due.pop(iteration, None)
        if not due:
            return NO_SEQUENCES
        return [*due.values()] if len(due) == 1 else [due[turn] for turn in sorted(due)]

    def clear(self) -> None:
        self.by_turn.clear()
        self.blocks = 0
        self._due.clear()
        self._iterations.clear()
