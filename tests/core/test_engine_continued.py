"""The engine model continues responses: their tokens do not depend on the number of attempts."""

from typing import NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from forebay.engine_model.model import EngineModel, EngineRequest, EngineStage, EngineStep
from forebay.engine_model.sequence import generate_tokens
from forebay.events.base import pack_u32
from tests.core.engine_runs import VOCABULARY, answers, config, replay_cache, request, run
from tests.depth import examples


class Response(NamedTuple):
    """One response, and the positions at which attempts begin to continue it."""

    prompt: list[int]
    length: int
    scripted: int  # number of tokens that are not sampled
    begins: list[int]
    stage: EngineStage

    def tokens(self, seed: int) -> list[int]:
        """Return the undisturbed response."""
        scripted = min(self.scripted, self.length)
        sampled = generate_tokens(seed, scripted, self.length - scripted, VOCABULARY)
        return [*range(2000, 2000 + scripted), *sampled]

    def attempt(self, name: str, seed: int, begin: int) -> EngineRequest:
        """Return an attempt that continues the response after `begin` tokens."""
        whole = self.tokens(seed)
        # At the stage `decode` the seed comes with the fetched KV.
        token_seed = seed if self.stage == "aggregated" else 0
        made = request(name, self.prompt + whole[:begin], self.length - begin, seed=token_seed, stage=self.stage)
        return msgspec.structs.replace(made, output=pack_u32(whole[begin : self.scripted]), first_position=begin)


responses = st.builds(
    Response,
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    length=st.integers(1, 20),
    scripted=st.sampled_from([0, 0, 3, 30]),
    begins=st.lists(st.integers(0, 19), min_size=1, max_size=3),
    stage=st.sampled_from(["aggregated", "decode"]),
)


def fetch_all(model: EngineModel, seeds: dict[str, int], until_us: int) -> list[EngineStep]:
    """Run the model to the end. All KV arrives at once."""
    steps: list[EngineStep] = []
    while True:
        for fetch in model.fetches():
            assert model.fetched(fetch.request_id, seeds[fetch.request_id])
        step = model.step(until_us)
        if step is None:
            return steps
        steps.append(step)


@examples(3)
@given(
    drawn=st.lists(responses, min_size=1, max_size=6),
    sizes=st.sampled_from([{}, {"kv_blocks_total": 9}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 4}]),
    until_us=st.sampled_from([0, 1_000_000]),
)
def test_continued_tokens_equal_those_of_the_undisturbed_response(
    drawn: list[Response], sizes: dict[str, int], until_us: int
) -> None:
    model = EngineModel(config(**sizes))
    seeds, expected = dict[str, int](), dict[str, list[int]]()
    for number, one in enumerate(drawn):
        seed = number + 1
        for begin in sorted({0, *one.begins}):
            if begin < one.length:
                name = f"r{number} from {begin}"
                seeds[name], expected[name] = seed, one.tokens(seed)[begin:]
                model.submit(one.attempt(name, seed, begin))
    steps = fetch_all(model, seeds, until_us)
    assert answers(steps) == expected
    assert replay_cache(steps) == model.pool.content()


def test_without_a_vocabulary_the_position_changes_nothing() -> None:
    runs = []
    for first_position in (0, 7):
        model = EngineModel(config(vocabulary=None))
        model.submit(msgspec.structs.replace(request("a", [1, 2, 3], 20), first_position=first_position))
        runs.append(run(model))
    assert runs[0] == runs[1]
