"""Other lengths and another variety of prompts, with what they have in common kept.

Theory of operation. The shared part of a prompt are its leading ids that another prompt of the workload has, too; the
rest is its own. A block of the shared part at depth d becomes those at depths round(d * m) to round((d + 1) * m) - 1,
in every prompt that has it: prompts that shared k blocks share round(k * m). What is a prompt's own is scaled in
tokens. Copies of what is shared have ids of their own, and a session stays in one copy. After Dynamo's data generator,
which draws new prompts from the same tree, where this changes the recorded ones.
"""

from array import array
from collections.abc import Iterator

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from forebay.simulate.workload import Turn, WorkloadOptions, WorkloadUnusable
from forebay.simulate.workloads.source import PROMPT_TOKENS_MAX

SHARED_IDS_MAX = 1 << 24  # distinct ids among which what is shared is looked for: some 100 bytes each
ID_BITS_CUT = 11  # ids of 53 bits: what reads JSON elsewhere rounds longer ones


class Scaling:
    """What the multipliers of some options make of requests.

    Attributes:
        changes: whether they make anything of them.
    """

    def __init__(self, options: WorkloadOptions, block_tokens: int) -> None:
        self._prefix = options.prefix_multiplier
        self._prompt = options.prompt_multiplier
        self._roots = options.prefix_roots
        self._seed = options.seed
        self._block_tokens = block_tokens
        self.changes = (self._prefix, self._prompt, self._roots) != (1.0, 1.0, 1)
        self._shared = array("L")  # leading ids that others have, too, by number
        self._copy = array("L")

    def learn(self, turns: Iterator[Turn]) -> None:
        """Find what is shared, from all requests in order. Raises WorkloadUnusable for too many ids."""
        first: dict[int, int] = {}  # who has an id first
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
                text = f"more than {SHARED_IDS_MAX} different block ids: what is shared cannot be told"
                raise WorkloadUnusable(f"{text}; scale fewer requests")

    def scaled(self, turn: Turn) -> Turn:
        """One of those that were learnt, with its new length and ids. Raises WorkloadUnusable if too long."""
        size = self._block_tokens
        ids = turn.block_ids[: -(-turn.prompt_tokens // size)]
        shared = ids[: self._shared[turn.number]]
        whole = min(len(shared), turn.prompt_tokens // size)
        copy = self._copy_of(turn)
        named = [new for depth, one in enumerate(shared) for new in self._names(one, depth, copy)]
        tokens = self._depth(whole) * size
        own_tokens = turn.prompt_tokens - min(len(shared) * size, turn.prompt_tokens)
        if len(shared) > whole:  # a last block that is not full, and shared
            room = (self._depth(whole + 1) - self._depth(whole)) * size
            tokens += min(room, _rounded((turn.prompt_tokens - whole * size) * self._prefix))
        own_tokens = _rounded(own_tokens * self._prompt)
        tokens = max(1, tokens + own_tokens)
        if tokens > PROMPT_TOKENS_MAX:
            raise WorkloadUnusable(f"request {turn.number}: scaled to {tokens} tokens, beyond {PROMPT_TOKENS_MAX}")
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
        """Ids that nobody else has: the recorded ones, then new ones."""
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
    """Half up, so that of two values the greater is never rounded to less."""
    return int(value + 0.5)
