"""A plain model of an engine, which simulations of few workers are compared with."""

from collections.abc import Sequence

from hypothesis import strategies as st

from forebay.simulate.workload import Turn
from tests.simulate.scene import turn

BLOCK = 64


class Cache:
    """Blocks with their reference counts. Unused blocks are evicted in the order in which they were released."""

    def __init__(self, total: int) -> None:
        self.free = total  # neither used nor cached
        self.users: dict[object, int] = {}
        self.idle: list[object] = []

    def has(self, name: object) -> bool:
        return name in self.users or name in self.idle

    def use(self, name: object) -> None:
        if name in self.idle:
            self.idle.remove(name)
        self.users[name] = self.users.get(name, 0) + 1

    def leave(self, name: object) -> None:
        self.users[name] -= 1
        if not self.users[name]:
            del self.users[name]
            self.idle.append(name)

    def new(self, blocks: int, found: Sequence[object] = ()) -> bool:
        """Reserve `blocks` new blocks and use the `found` ones. Return False and change nothing if space is short."""
        if blocks > self.free + sum(name not in found for name in self.idle):
            return False
        for name in found:
            self.use(name)
        while self.free < blocks:
            self.idle.pop(0)
            self.free += 1
        self.free -= blocks
        return True


class EngineSequence:
    """Request in the reference engine, with the names of its full blocks and its total number of blocks."""

    def __init__(self, request: Turn) -> None:
        self.request = request
        self.generated = self.computed = self.blocks = 0
        self.decodes = False
        self.names: list[object] = []
        self.cached = self.first_us = self.last_us = -1

    def name(self, block: int) -> object:
        if (block + 1) * BLOCK <= self.request.prompt_tokens and self.request.block_ids:
            return self.request.block_ids[: block + 1]
        return "own", self.request.number, block

    @property
    def known(self) -> int:
        return self.request.prompt_tokens + self.generated


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    at_us = 0
    for number in range(draw(st.integers(1, 25))):
        at_us += draw(st.sampled_from([0, 0, 1, 9_000, 200_000, 3_000_000]))
        ids = tuple(draw(st.lists(st.integers(0, 1), max_size=7)))
        prompt = draw(st.integers((len(ids) - 1) * BLOCK + 1, len(ids) * BLOCK)) if ids else draw(st.integers(1, 300))
        output = draw(st.one_of(st.integers(1, 4), st.integers(1, 150)))
        turns.append(turn(number, prompt, output, block_ids=ids, at_us=at_us))
    return tuple(turns)
