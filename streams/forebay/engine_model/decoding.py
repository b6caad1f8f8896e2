"""The sequences of the engine model that decode, and at which iteration each has to be looked at again."""

from heapq import heappop, heappush
from typing import NamedTuple

from forebay.engine_model.sequence import EngineSequence


class Joining(NamedTuple):
    """Sequences whose KV was fetched, and which begin to decode; and the blocks that they hold."""

    sequences: int
    blocks: int


NOBODY_JOINS = Joining(0, 0)


class Decoding:
    """Who decodes.

    Attributes:
        by_turn: all of them, oldest first.
        blocks: what they hold together; a block that several share counts for each.
    """

    def __init__(self) -> None:
        self.by_turn: dict[int, EngineSequence] = {}
        self.blocks = 0
        self._turns = 0
        self._due: dict[int, dict[int, EngineSequence]] = {}  # by iteration, then by turn
        self._iterations: list[int] = []  # a heap of those at which somebody is due, or was to be

    def add(self, sequence: EngineSequence) -> None:
        """One more decodes, the newest."""
        sequence.turn = self._turns
        self._turns += 1
        self.by_turn[sequence.turn] = sequence
        self.blocks += sequence.blocks

    def remove(self, sequence: EngineSequence) -> None:
        """One decodes no longer, and holds its blocks still."""
        del self.by_turn[sequence.turn]
        self.blocks -= sequence.blocks
        others = self._due.get(sequence.due)
        if others is not None and others.pop(sequence.turn, None) is not None and not others:
            del self._due[sequence.due]

    def newest(self) -> EngineSequence:
        """Who began last; there is somebody."""
        return self.by_turn[next(reversed(self.by_turn))]

    def look_at(self, sequence: EngineSequence, iteration: int) -> None:
        """One of them is due at this iteration, later than that of now."""
        sequence.due = iteration
        others = self._due.get(iteration)
        if others is None:
            self._due[iteration] = {sequence.turn: sequence}
            heappush(self._iterations, iteration)
        else:
            others[sequence.turn] = sequence

    def next_due(self) -> int:
        """The first iteration at which somebody is due; there is one."""
        while self._iterations[0] not in self._due:
            heappop(self._iterations)
        return self._iterations[0]

    def take_due(self, iteration: int) -> list[EngineSequence]:
        """Who is due at this iteration, oldest first; iterations never go back, and none is left out."""
        while self._iterations and self._iterations[0] <= iteration:
            heappop(self._iterations)
        due = self._due.pop(iteration, None)
        return [due[turn] for turn in sorted(due)] if due else []

    def clear(self) -> None:
        """Nobody decodes."""
        self.by_turn.clear()
        self.blocks = 0
        self._due.clear()
        self._iterations.clear()
