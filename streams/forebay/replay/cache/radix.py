"""A radix tree over the block hashes of prompts.

A sequence hash identifies its block and all blocks before it. So two prompts that have the same hash at a position have
the same hashes at all earlier positions, and a binary search finds where they part.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of blocks that the same prompts share, or the root of a tree, whose run is empty.

    Attributes:
        start: position of the run's first block in the prompt.
        end: position after the run's last block in the prompt.
        newest: number of the first added prompt with this run.
        children: continuations, by the hash of their first block.
    """

    prompt: "array[int]"
    start: int
    end: int
    hits: int = 0
    newest: int = 0
    children: "dict[int, RadixNode]" = field(default_factory=dict)

    def add(self, prompt: "array[int]", number: int) -> None:
        """Add a prompt to the tree with this root.

        Args:
            number: number of the prompt, as in `newest`.
        """
        node, at = self, 0
        node.hits += 1
        while at < len(prompt):
            child = node.children.get(prompt[at])
            if child is None:
                node.children[prompt[at]] = RadixNode(prompt, at, len(prompt), 1, number)
                return
            shared = child._shared(prompt)
            if shared < child.end:
                child = node.children[prompt[at]] = child._split(shared)
            child.hits += 1
            node, at = child, shared

    def path(self, prompt: "array[int]") -> "Iterator[RadixNode]":
        """Yield the nodes of a prompt that is in the tree with this root, without the root."""
        node, at = self, 0
        while at < len(prompt):
            node = node.children[prompt[at]]
            at = node.end
            yield node

    def count_blocks(self) -> int:
        """Return the number of different blocks in the tree with this root."""
        count, pending = 0, [self]
        while pending:
            node = pending.pop()
            count += node.end - node.start
            pending += node.children.values()
        return count

    def _shared(self, prompt: "array[int]") -> int:
        """Return the position at which the run and a prompt part. They share the first block of the run."""
        positions = range(self.start, min(self.end, len(prompt)))
        return self.start + bisect_left(positions, 1, key=lambda at: prompt[at] != self.prompt[at])

    def _split(self, at: int) -> "RadixNode":
        """Return a node with the blocks of this run before a position. This node keeps the others, as its child."""
        first = RadixNode(self.prompt, self.start, at, self.hits, self.newest, {self.prompt[at]: self})
        self.start = at
        return first
