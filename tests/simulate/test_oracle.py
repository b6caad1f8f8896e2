"""The simulator matches a slow reference model of one worker that tracks every block and iteration."""

from collections import deque
from collections.abc import Sequence

from hypothesis import event, given
from hypothesis import strategies as st

from forebay.engine_model.timing import decode_us, prefill_us
from forebay.simulate.settings import policy
from forebay.simulate.simulation import Simulation
from forebay.simulate.workload import Turn
from tests.depth import examples
from tests.simulate.oracle import BLOCK, Cache, EngineSequence, workloads
from tests.simulate.scene import Turns, fleet


class Worker:
    def __init__(self, blocks: int, seqs: int, batched: int) -> None:
        self.total, self.seqs, self.batched = blocks, seqs, batched
        self.cache = Cache(blocks)
        self.running: list[EngineSequence] = []
        self.waiting: deque[EngineSequence] = deque()
        self.preempted = 0

    def step(self, now_us: int) -> int:
        """Run one iteration from `now_us` and return its end time."""
        decoding = [one for one in self.running if one.decodes]
        crowded = False
        for one in list(decoding):
            while one in self.running and one.blocks * BLOCK < one.known and not self._more(one, 1):
                preempted = self._preempt()
                crowded = True
                if preempted in decoding:
                    decoding.remove(preempted)
        budget = self.batched - len(decoding)
        tokens, done = 0, []
        while budget:
            partial = [one for one in self.running if one not in decoding and one not in done]
            if partial:
                one = partial[0]
                chunk = min(budget, one.known - one.computed)
                if not self._more(one, -(-(one.computed + chunk) // BLOCK) - one.blocks):
                    self._preempt()
                    break
            elif crowded or not self.waiting or len(self.running) >= self.seqs:
                break
            else:
                one = self.waiting[0]
                chunk = self._admit(one, budget)
                if not chunk:
                    break
                self.running.append(self.waiting.popleft())
            budget -= chunk
            tokens += chunk
            self._compute(one, chunk)
            if one.computed == one.known:
                done.append(one)
        held = sum(one.blocks for one in decoding) * BLOCK
        ends_us = now_us + prefill_us(tokens) + (decode_us(held, self.total * BLOCK) if decoding else 0)
        for one in decoding:
            self._compute(one, 1)
        for one in [*decoding, *done]:
            one.generated += 1
            one.decodes = True
            if one.generated == 1:
                one.first_us = ends_us
            if one.generated == one.request.output_tokens:
                one.last_us = ends_us
                self._leave(one)
        return ends_us

    def _more(self, one: EngineSequence, blocks: int) -> bool:
        if not self.cache.new(blocks):
            return False
        one.blocks += blocks
        return True

    def _admit(self, one: EngineSequence, budget: int) -> int:
        found: list[object] = []
        while (len(found) + 1) * BLOCK < one.known and self.cache.has(one.name(len(found))):
            found.append(one.name(len(found)))
        chunk = min(budget, one.known - len(found) * BLOCK)
        blocks = -(-(len(found) * BLOCK + chunk) // BLOCK)
        if not self.cache.new(blocks - len(found), found):
            return 0
        one.names, one.blocks, one.computed = found, blocks, len(found) * BLOCK
        one.cached = one.computed if one.cached < 0 else one.cached
        return chunk

    def _compute(self, one: EngineSequence, tokens: int) -> None:
        one.computed += tokens
        while (len(one.names) + 1) * BLOCK <= one.computed:
            name = one.name(len(one.names))
            self.cache.free += self.cache.has(name)
            self.cache.use(name)
            one.names.append(name)

    def _leave(self, one: EngineSequence) -> None:
        for name in reversed(one.names):
            self.cache.leave(name)
        self.cache.free += one.blocks - len(one.names)
        one.names, one.blocks, one.computed, one.decodes = [], 0, 0, False
        self.running.remove(one)

    def _preempt(self) -> EngineSequence:
        preempted = self.running[-1]
        self._leave(preempted)
        self.waiting.appendleft(preempted)
        self.preempted += 1
        return preempted


def run_reference(turns: Sequence[Turn], worker: Worker) -> list[EngineSequence]:
    sequences = [EngineSequence(one) for one in turns]
    coming = deque(sequences)
    now_us = 0
    while coming or worker.running or worker.waiting:
        if not worker.running and not worker.waiting:
            now_us = max(now_us, coming[0].request.at_us)
        while coming and coming[0].request.at_us <= now_us:
            worker.waiting.append(coming.popleft())
        now_us = worker.step(now_us)
    return sequences


@examples(1.5)
@given(
    turns=workloads(),
    blocks=st.sampled_from([10, 14, 20, 60]),
    seqs=st.sampled_from([2, 4, 16]),
    batched=st.integers(16, 600),
)
def test_lone_worker_matches_the_oracle(turns: tuple[Turn, ...], blocks: int, seqs: int, batched: int) -> None:
    worker = Worker(blocks, seqs, batched)
    expected = run_reference(turns, worker)
    event(f"preempted: {worker.preempted > 0}, found: {any(one.cached for one in expected)}")
    sizes = {"kv_blocks": blocks, "max_num_seqs": seqs, "max_num_batched_tokens": batched}
    found = Simulation(fleet(1, sizes=sizes), policy("round-robin")).run(Turns(*turns), lambda _: None)
    assert [(one.first_us, one.last_us, one.cached_tokens) for one in found.requests] == [
        (one.first_us, one.last_us, one.cached) for one in expected
    ]
