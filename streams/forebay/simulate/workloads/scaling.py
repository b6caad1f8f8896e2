"""Scaling of prompt lengths and prefix variety that preserves prefix sharing.

Theory of operation. The shared part of a prompt consists of its leading block ids that occur in another prompt, too.
The remaining tokens are its own part. With the prefix multiplier m, a shared block at position d becomes the blocks at
positions round(d * m) to round((d + 1) * m) - 1, in every prompt that contains the block. Prompts that shared k blocks
then share round(k * m) blocks. The own part is scaled in tokens. Each copy of the shared prefixes has its own ids, and
a session stays in one copy. The method follows Dynamo's data generator, which draws new prompts from the tree of
recorded prefixes. This module changes the recorded prompts instead.
"""

from array import array
from collections.abc import Iterator

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from forebay.simulate.workload import Turn, WorkloadOptions, WorkloadUnusable
from forebay.simulate.workloads.source import PROMPT_TOKENS_MAX

SHARED_IDS_MAX = 1 << 24  # maximum number of distinct ids to search for shared prefixes, about 100 bytes each
ID_BITS_CUT = 11  # leaves 53 bits, because other JSON readers round larger integers


class Scaling:
    """Scales the prompts of a workload by the multipliers of `WorkloadOptions`. Call `learn` first, then `scaled`.

    If `changes` is false, the multipliers change no prompt, so `learn` and `scaled` are not needed.
    """

    def __init__(self, options: WorkloadOptions, block_tokens: int) -> None:
        self._prefix = options.prefix_multiplier
        self._prompt = options.prompt_multiplier
        self._roots = options.prefix_roots
        self._seed = options.seed
        self._block_tokens = block_tokens
        self.changes = (self._prefix, self._prompt, self._roots) != (1.0, 1.0, 1)
        self._shared = array("L")  # number of shared leading ids, by request number
        self._copy = array("L")

    def learn(self, turns: Iterator[Turn]) -> None:
        """Find the shared prefixes of all requests, in the order of the workload."""
        first: dict[int, int] = {}  # number of the first request with an id
        shared = self._shared
        for turn in turns:
            lead = 0
            for one in turn.block_ids:
                if (owner := first.get(one)) is None:
                    break
                lead += 1
                shared[owner] = max(shared[owner], lead)
            shared.append(lead)
            first.update(dict.fromkeys(turn.block_ids[lead:], turn.number))
            if len(first) > SHARED_IDS_MAX:
                text = f"more than {SHARED_IDS_MAX} distinct block ids, too many to find the shared prefixes"
                raise WorkloadUnusable(f"{text}; scale fewer requests")

    def scaled(self, turn: Turn) -> Turn:
        """Return a request with the scaled prompt length and new block ids."""
        size = self._block_tokens
        ids = turn.block_ids[: -(-turn.prompt_tokens // size)]
        shared = ids[: self._shared[turn.number]]
        whole = min(len(shared), turn.prompt_tokens // size)
        copy = self._copy_of(turn)
        named = [new for depth, one in enumerate(shared) for new in self._names(one, depth, copy)]
        tokens = self._depth(whole) * size
        own_tokens = turn.prompt_tokens - min(len(shared) * size, turn.prompt_tokens)
        if len(shared) > whole:  # the last block is shared and partial
            room = (self._depth(whole + 1) - self._depth(whole)) * size
            tokens += min(room, _rounded((turn.prompt_tokens - whole * size) * self._prefix))
        own_tokens = _rounded(own_tokens * self._prompt)
        tokens = max(1, tokens + own_tokens)
        if tokens > PROMPT_TOKENS_MAX:
            reason = f"scaled to {tokens} tokens; the maximum is {PROMPT_TOKENS_MAX}"
            raise WorkloadUnusable(f"request {turn.number}: {reason}")
        if ids:
            named = named[: -(-tokens // size)]
            named += self._own(turn, ids[len(shared) :], -(-tokens // size) - len(named))
        return replace(turn, prompt_tokens=tokens, block_ids=tuple(named))

    def _depth(self, blocks: int) -> int:
        return _rounded(blocks * self._prefix)

    def _names(self, one: int, depth: int, copy: int) -> Iterator[int]:
        count = self._depth(depth + 1) - self._depth(depth)
        if count == 1 and not copy:
            yield one
            return
        first = xxh3_64_intdigest(b"%d in %d" % (one, copy)) >> ID_BITS_CUT
        yield from range(first, first + count)

    def _own(self, turn: Turn, ids: tuple[int, ...], count: int) -> Iterator[int]:
        """Yield `count` ids for the own part of a prompt: the recorded ones, then new unique ones."""
        yield from ids[:count]
        first = xxh3_64_intdigest(b"own %d" % turn.number) >> ID_BITS_CUT
        yield from range(first, first + max(0, count - len(ids)))

    def _copy_of(self, turn: Turn) -> int:
        if self._roots == 1:
            return 0
        if turn.session_id:
            copy = xxh3_64_intdigest(turn.session_id.encode(), self._seed) % self._roots
        elif turn.after:
            copy = self._copy[turn.after[0]]
        else:
            copy = xxh3_64_intdigest(b"%d" % turn.number, self._seed) % self._roots
        self._copy.append(copy)
        return copy


def _rounded(value: float) -> int:
    """Round half up, so that a greater value is never rounded to a smaller integer."""
    return int(value + 0.5)
