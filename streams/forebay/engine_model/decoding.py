"""Sequences of the engine model that decode, with the iteration at which each must be checked again."""

from heapq import heappop, heappush
from typing import NamedTuple

from forebay.engine_model.sequence import EngineSequence


class JoiningSequences(NamedTuple):
    """Sequences whose KV was fetched and that start to decode, and the number of blocks they hold."""

    sequences: int
    blocks: int


NONE_JOINING = JoiningSequences(0, 0)


class DecodingBatch:
    """Decoding sequences.

    Attributes:
        by_turn: all sequences, oldest first.
        blocks: number of blocks they hold; a shared block counts once per sequence.
    """

    def __init__(self) -> None:
        self.by_turn: dict[int, EngineSequence] = {}
        self.blocks = 0
        self._turns = 0
        self._due: dict[int, dict[int, EngineSequence]] = {}  # by iteration, then by turn
        self._iterations: list[int] = []  # heap of iterations in `_due`, possibly with stale ones

    def add(self, sequence: EngineSequence) -> None:
        """Add a sequence as the newest."""
        sequence.turn = self._turns
        self._turns += 1
        self.by_turn[sequence.turn] = sequence
        self.blocks += sequence.blocks

    def remove(self, sequence: EngineSequence) -> None:
        """Remove a sequence that stops decoding; it still holds its blocks."""
        del self.by_turn[sequence.turn]
        self.blocks -= sequence.blocks
        others = self._due.get(sequence.due)
        if others is not None and others.pop(sequence.turn, None) is not None and not others:
            del self._due[sequence.due]

    def newest(self) -> EngineSequence:
        """Return the newest sequence; there must be one."""
        return self.by_turn[next(reversed(self.by_turn))]

    def look_at(self, sequence: EngineSequence, iteration: int) -> None:
        """Schedule the next check of a sequence at a later iteration."""
        sequence.due = iteration
        others = self._due.get(iteration)
        if others is None:
            self._due[iteration] = {sequence.turn: sequence}
            heappush(self._iterations, iteration)
        else:
            others[sequence.turn] = sequence

    def next_due(self) -> int:
        """Return the first iteration with a scheduled check; there must be one."""
        while self._iterations[0] not in self._due:
            heappop(self._iterations)
        return self._iterations[0]

    def take_due(self, iteration: int) -> list[EngineSequence]:
        """Remove and return the sequences due at this iteration, oldest first; no iteration with one may be skipped."""
        while self._iterations and self._iterations[0] <= iteration:
            heappop(self._iterations)
        due = self._due.pop(iteration, None)
        return [due[turn] for turn in sorted(due)] if due else []

    def clear(self) -> None:
        """Remove all sequences."""
        self.by_turn.clear()
        self.blocks = 0
        self._due.clear()
        self._iterations.clear()
