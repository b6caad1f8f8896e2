"""The engine model with prefill and decode apart: what one keeps, and what another fetches."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engine_model.model import Computed, EngineModel, Fetch, FirstTokenStep, RequestTooLarge, Stored
from forebay.engine_model.sequence import generate_tokens
from forebay.engine_model.steps import EngineStep
from forebay.engine_model.timing import decode_us, prefill_us
from tests.core.engine_runs import (
    BLOCK,
    VOCABULARY,
    RecordingTiming,
    answers,
    config,
    engine,
    finished,
    hashes,
    replay_cache,
    request,
    run,
)
from tests.depth import examples


def fetch_all(model: EngineModel, until_us: int = 0) -> list[EngineStep]:
    """Run to the end; what is to be fetched is there at once."""
    steps: list[EngineStep] = []
    while True:
        for fetch in model.fetches():
            assert model.fetched(fetch.request_id)
        step = model.step(until_us)
        if step is None:
            return steps
        steps.append(step)


def test_a_computed_prompt_emits_nothing_and_is_kept_until_release() -> None:
    model = engine(request("a", list(range(10)), 50, stage="prefill"))
    (step,) = run(model)
    assert (step.duration_us, step.emitted, step.first_tokens, step.finished) == (prefill_us(10), [], [], [])
    assert step.computed == [Computed("a", 1, 0)]
    assert (step.load.running, step.load.waiting, step.load.kv_blocks_used) == (0, 0, 3)
    assert model.pool.content() == set(hashes(list(range(10))))
    assert model.generated() == {"a": 0}
    assert model.release("a")
    assert not model.release("a")
    assert not model.cancel("a")
    assert (model.pool.used, model.pool.cached) == (0, 2)
    model.submit(request("b", list(range(10)), 1, attempt=2, stage="prefill"))
    assert run(model)[0].computed == [Computed("b", 2, 8)]


def test_what_is_kept_is_neither_evicted_nor_counted_free() -> None:
    model = EngineModel(config(kv_blocks_total=8))
    model.submit(request("kept", list(range(20)), 1, stage="prefill"))
    model.submit(request("too-much", list(range(50, 66)), 1, stage="prefill"))
    assert [one.request_id for step in run(model) for one in step.computed] == ["kept"]
    assert (model.load().waiting, model.pool.used) == (1, 5)
    model.submit(request("never-mind", [7], 3))
    assert model.step() is None  # first come, first served
    assert model.release("kept")
    assert [one.request_id for step in run(model) for one in step.computed] == ["too-much"]
    assert [model.cancel("too-much"), model.pool.used] == [True, 0]


def test_a_prefill_request_needs_no_output_blocks() -> None:
    model = engine(request("a", list(range(8)), 1_000, stage="prefill"), kv_blocks_total=2)
    assert run(model)[0].computed
    with pytest.raises(RequestTooLarge, match=r"9 prompt tokens and 0 to generate need 3 KV blocks .* has 2"):
        model.submit(request("b", list(range(9)), 1, stage="prefill"))


def test_what_was_computed_elsewhere_is_fetched_and_its_last_token_computed() -> None:
    model = EngineModel(config())
    prompt = list(range(10))
    model.submit(request("a", prompt, 3, stage="decode"))
    assert model.fetches() == [Fetch("a", 1, 0, 3)]
    assert model.fetches() == []
    assert model.step() is None
    assert (model.load().running, model.load().waiting, model.load().kv_blocks_used) == (0, 1, 3)
    assert model.pool.content() == set()
    assert model.fetched("a")
    assert not model.fetched("a")
    steps = run(model)
    assert [step.duration_us for step in steps] == [decode_us(3, 32)] * 3
    assert steps[0].cache_changes == [Stored(None, array("Q", hashes(prompt)))]
    assert steps[0].first_tokens == [FirstTokenStep("a", 1, 9)]
    assert finished(steps)[0].cached_tokens == 9
    assert answers(steps) == {"a": generate_tokens(7, 0, 3, VOCABULARY)}
    assert model.pool.used == 0


@pytest.mark.parametrize(("own", "first"), [(7, 1), (8, 2), (30, 2)])
def test_cached_blocks_are_not_fetched_except_the_last(own: int, first: int) -> None:
    model = EngineModel(config())
    prompt = list(range(12))
    model.submit(request("before", [*prompt, *range(12, 40)][:own], 1))
    run(model)
    model.submit(request("a", prompt, 2, stage="decode"))
    assert model.fetches() == [Fetch("a", 1, first, 3)]
    assert model.fetched("a")
    steps = run(model)
    assert steps[0].first_tokens == [FirstTokenStep("a", 1, 11)]
    assert answers(steps) == {"a": generate_tokens(7, 0, 2, VOCABULARY)}
    assert set(hashes(prompt)) <= model.pool.content()


def test_a_request_without_room_waits_while_others_run() -> None:
    model = engine(request("running", [1, 2], 20), kv_blocks_total=8)
    model.step()
    model.submit(request("a", list(range(20)), 1, stage="decode"))
    model.submit(request("b", list(range(50, 62)), 1, stage="decode"))
    assert [fetch.request_id for fetch in model.fetches()] == ["a"]
    assert model.fetched("a")
    steps = [step for _ in range(3) if (step := model.step())]
    assert [end.request_id for end in finished(steps)] == ["a"]
    assert [fetch.request_id for fetch in model.fetches()] == ["b"]
    assert model.fetched("b")
    assert sorted(end.request_id for end in finished(run(model))) == ["b", "running"]


def test_admission_order_is_independent_of_the_stage() -> None:
    model = EngineModel(config(max_num_seqs=3, max_num_batched_tokens=64))
    for name, stage in (("a", "aggregated"), ("b", "decode"), ("c", "aggregated"), ("d", "aggregated")):
        model.submit(request(name, [ord(name)] * 5, 30, stage=stage))  # type: ignore[arg-type]
    assert model.fetches() == []  # a is before it
    step = model.step()
    assert step is not None
    assert [first.request_id for first in step.first_tokens] == ["a", "c", "d"]
    assert model.fetches() == [Fetch("b", 1, 0, 2)]
    assert model.fetched("b")
    model.submit(request("e", [1], 1, stage="decode"))
    step = model.step()
    assert step is not None
    assert ([first.request_id for first in step.first_tokens], model.fetches()) == ([], [])
    model.cancel("a")
    assert model.fetches() == []  # b has its place
    step = model.step()
    assert step is not None
    assert [first.request_id for first in step.first_tokens] == ["b"]


def test_cancelled_while_it_is_fetched_or_was_it_frees_its_blocks() -> None:
    model = engine(request("first", [1] * 5, 5), request("a", list(range(10)), 3, stage="decode"))
    model.step()
    assert model.cancel("a")  # it has its blocks, and no fetch was requested
    assert model.fetches() == []
    model.submit(request("b", list(range(10)), 3, stage="decode"))
    model.submit(request("c", list(range(50, 60)), 3, stage="decode"))
    assert [fetch.request_id for fetch in model.fetches()] == ["b", "c"]
    assert model.cancel("b")
    assert not model.fetched("b")
    assert model.fetched("c")
    assert model.cancel("c")
    assert [model.cancel("first"), model.pool.used] == [True, 0]
    # What was stored when it came is reported, although no sequence runs.
    step = model.step()
    assert step is not None
    assert (step.duration_us, step.iterations) == (0, 0)
    assert replay_cache([step]) == set(hashes(list(range(50, 60)))) <= model.pool.content()
    assert model.step() is None


def test_preempted_after_its_kv_came_it_is_computed_here() -> None:
    model = EngineModel(config(kv_blocks_total=6))
    for name, seed in (("a", 7), ("b", 8)):
        model.submit(request(name, [ord(name)] * 3, 20, seed=seed, stage="decode"))
    steps = fetch_all(model)
    assert max(step.load.waiting for step in steps) == 1
    assert [first.request_id for step in steps for first in step.first_tokens] == ["a", "b"]
    assert answers(steps) == {"a": generate_tokens(7, 0, 20, VOCABULARY), "b": generate_tokens(8, 0, 20, VOCABULARY)}
    assert replay_cache(steps) == model.pool.content()


def test_who_is_preempted_for_what_is_fetched_goes_on_when_that_has_gone() -> None:
    model = engine(request("decoding", [1, 2, 3], 20), kv_blocks_total=6, max_num_batched_tokens=8)
    steps = [step] if (step := model.step()) else []
    model.submit(request("a", list(range(16)), 1, stage="decode"))
    model.submit(request("b", [5] * 8, 1, stage="decode"))
    assert [fetch.request_id for fetch in model.fetches()] == ["a"]
    steps += run(model)
    assert (model.load().running, model.load().waiting) == (0, 3)
    assert model.fetches() == []
    assert model.cancel("a")
    steps += fetch_all(model)
    assert answers(steps)["decoding"] == generate_tokens(7, 0, 20, VOCABULARY)
    assert sorted(end.request_id for end in finished(steps)) == ["b", "decoding"]


def test_a_prompt_in_chunks_makes_way_for_one_that_was_fetched() -> None:
    model = engine(request("long", list(range(24)), 1, stage="prefill"), kv_blocks_total=6, max_num_batched_tokens=8)
    model.step()
    model.submit(request("a", [5] * 9, 1, stage="decode"))
    assert model.fetches() == [Fetch("a", 1, 0, 3)]
    assert model.fetched("a")
    steps = run(model)
    assert [end.request_id for end in finished(steps)] == ["a"]
    assert [one.request_id for step in steps for one in step.computed] == ["long"]


def test_a_cleared_cache_keeps_nothing_for_others_and_computes_what_was_to_be_fetched() -> None:
    model = engine(request("kept", list(range(10)), 1, stage="prefill"), max_num_seqs=2)
    run(model)
    names = ("running", "came", "fetched", "waiting")
    for name in names:
        model.submit(request(name, [ord(name[0])] * 6, 4, stage="aggregated" if name == "running" else "decode"))
    model.step()
    assert [fetch.request_id for fetch in model.fetches()] == ["came", "fetched", "waiting"]
    assert model.fetched("came")
    model.clear_cache()
    assert (model.pool.content(), model.pool.used) == (frozenset(), 0)
    assert not model.release("kept")
    assert not model.fetched("fetched")
    assert model.fetches() == []
    steps = run(model)
    assert {end.request_id: end.cached_tokens for end in finished(steps)} == dict.fromkeys(names, 0)
    assert replay_cache(steps) == model.pool.content()


def test_reset_forgets_what_is_kept_and_fetched() -> None:
    model = engine(request("kept", list(range(10)), 1, stage="prefill"))
    run(model)
    model.submit(request("a", list(range(10)), 1, stage="decode"))
    model.fetches()
    model.submit(request("b", list(range(50, 60)), 1, stage="decode"))
    model.fetches()
    assert model.fetched("b")
    model.reset()
    assert [model.release("kept"), model.fetched("a"), model.step(), model.pool.used] == [False, False, None, 0]
    model.submit(request("kept", [1], 1))
    assert finished(run(model))


prompts = st.builds(lambda root, size: [root] * min(size, 3) + list(range(size)), st.integers(0, 2), st.integers(1, 30))


@examples(2)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 25)), min_size=1, max_size=8),
    before=st.integers(0, 4),
    until_us=st.sampled_from([0, 100_000]),
)
def test_a_fetched_prompt_is_answered_as_one_that_is_in_the_cache(
    lengths: list[tuple[int, int]], before: int, until_us: int
) -> None:
    """With room for all, and prompts of which one token more than full blocks is to be computed."""
    histories = []
    for stage in ("decode", "aggregated"):
        model = EngineModel(config(kv_blocks_total=200, max_num_seqs=8, timing=RecordingTiming()))
        prompts = [
            [number * 100 + at for at in range(blocks * BLOCK + 1)] for number, (blocks, _) in enumerate(lengths)
        ]
        if stage == "aggregated":
            model.warm([block for prompt in prompts for block in hashes(prompt)])
        steps: list[EngineStep] = []
        for number, (_, max_tokens) in enumerate(lengths):
            model.submit(request(f"r{number}", prompts[number], max_tokens, seed=number, stage=stage))
            for _ in range(before):
                for fetch in model.fetches():
                    assert model.fetched(fetch.request_id)
                steps += [step] if (step := model.step()) else []
        histories.append(steps + fetch_all(model, until_us))
    fetched, cached = histories
    assert answers(fetched) == answers(cached)
    for one, other in zip(fetched, cached, strict=True):
        assert (one.duration_us, one.iterations, one.load) == (other.duration_us, other.iterations, other.load)
        assert (one.first_tokens, one.finished) == (other.first_tokens, other.finished)
