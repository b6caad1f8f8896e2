"""The engine model when its cache is cleared, whatever runs."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.engine_model.model import EngineModel
from forebay.engine_model.sequence import generate_tokens
from tests.core.engine_runs import VOCABULARY, answers, config, finished, replay_cache, request, run
from tests.depth import examples


@examples(2)
@given(
    prompts=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    before=st.integers(0, 30),
    sizes=st.sampled_from([{}, {"kv_blocks_total": 14}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 4}]),
)
def test_a_cleared_cache_is_empty_and_nothing_is_lost(prompts: list[int], before: int, sizes: dict[str, int]) -> None:
    model = EngineModel(config(**sizes))
    for number, length in enumerate(prompts):
        model.submit(request(f"r{number}", list(range(length)), 9, seed=number))
    steps = [step for _ in range(before) if (step := model.step()) is not None]
    model.clear_cache()
    assert (model.pool.content(), model.pool.used, model.load().running) == (frozenset(), 0, 0)
    after = run(model)
    assert replay_cache(after) == model.pool.content()
    assert model.pool.used == 0
    output = answers(steps + after)
    assert output == {f"r{number}": generate_tokens(number, 0, 9, VOCABULARY) for number in range(len(prompts))}
    assert sorted(end.request_id for end in finished(steps + after)) == sorted(output)
