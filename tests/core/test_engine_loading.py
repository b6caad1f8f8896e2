"""The engine model when blocks of a prompt are loaded from slower tiers."""

from array import array

import msgspec
import pytest

from forebay.engine_model.model import Computed, EngineModel, EngineStep, Fetch, FirstTokenStep, Load, Stored
from forebay.engine_model.sequence import generate_tokens
from forebay.engine_model.timing import prefill_us
from forebay.events.base import pack_u32
from tests.core.engine_runs import (
    BLOCK,
    VOCABULARY,
    Tier,
    answers,
    config,
    engine,
    finished,
    hashes,
    replay_cache,
    request,
    run,
)

PROMPT = list(range(18))  # four full blocks, and two tokens


def loading(model: EngineModel) -> list[Load]:
    """Run to the end, or until only loads are left. Return the loads that began."""
    begun: list[Load] = []
    while True:
        step = model.step()
        new = model.loads()
        begun += new
        if step is None and not new:
            return begun


def test_a_prompt_is_loaded_before_its_rest_is_computed() -> None:
    tier = Tier(PROMPT)
    model = engine(request("a", PROMPT, 1), match=tier.match)
    assert model.step() is None
    assert model.loads() == [Load("a", 1, 0, 4)]
    assert model.loads() == []
    assert (model.load().running, model.load().waiting, model.load().kv_blocks_used) == (0, 1, 4)
    assert model.pool.content() == set()
    assert model.loaded("a", 4)
    assert not model.loaded("a", 4)
    (step,) = run(model)
    assert step.duration_us == prefill_us(2)
    assert step.cache_changes == [Stored(None, array("Q", hashes(PROMPT)))]
    assert step.first_tokens == [FirstTokenStep("a", 1, 16)]
    assert tier.asked == [("a", 0)]


@pytest.mark.parametrize("arrived", [0, 1, 3])
def test_blocks_that_did_not_arrive_are_computed(arrived: int) -> None:
    tier = Tier(PROMPT)
    model = engine(request("a", PROMPT, 3), match=tier.match, max_num_batched_tokens=64)
    assert loading(model) == [Load("a", 1, 0, 4)]
    assert model.loaded("a", arrived)
    steps = run(model)
    assert steps[0].duration_us == prefill_us(18 - arrived * BLOCK)
    assert finished(steps)[0].cached_tokens == arrived * BLOCK
    assert answers(steps) == {"a": generate_tokens(7, 0, 3, VOCABULARY)}
    assert tier.asked == [("a", 0)]  # no second load of the same blocks
    assert replay_cache(steps) == model.pool.content() == set(hashes([*PROMPT, *answers(steps)["a"]][:20]))


def test_only_blocks_after_the_cached_ones_are_loaded_and_never_the_last_token() -> None:
    tier = Tier(PROMPT)
    model = engine(request("before", [*PROMPT[:8], 99], 1), match=tier.match)
    assert loading(model) == [Load("before", 1, 0, 2)]
    assert model.loaded("before", 2)
    run(model)
    model.submit(request("a", PROMPT[:16], 1))
    assert loading(model) == [Load("a", 1, 2, 1)]
    assert model.loaded("a", 1)
    assert finished(run(model))[0].cached_tokens == 12
    model.submit(request("again", PROMPT[:13], 1))
    assert finished(run(model))[0].cached_tokens == 12
    assert [name for name, _ in tier.asked] == ["before", "a"]


def test_others_run_and_are_admitted_while_a_prompt_is_loaded() -> None:
    tier = Tier(PROMPT)
    model = engine(request("running", [1] * 5, 9), match=tier.match, max_num_batched_tokens=64)
    steps = [step] if (step := model.step()) else []
    model.submit(request("a", PROMPT, 1))
    model.submit(request("b", [3] * 5, 2))
    steps += [step for _ in range(3) if (step := model.step())]
    assert model.loads() == [Load("a", 1, 0, 4)]
    assert [first.request_id for step in steps for first in step.first_tokens] == ["running", "b"]
    model.submit(request("c", [4] * 5, 1))
    assert model.loaded("a", 4)
    steps += run(model)
    # "a" was submitted before "c".
    assert [first.request_id for step in steps for first in step.first_tokens] == ["running", "b", "a", "c"]
    assert replay_cache(steps) == model.pool.content()


def test_loads_that_end_in_another_order_keep_their_places_in_the_queue() -> None:
    prompts = {name: [number] * 4 + PROMPT[:5] for number, name in enumerate("abcd", 100)}
    tier = Tier(*[prompts[name] for name in "abc"])
    model = EngineModel(config(max_num_seqs=4, max_num_batched_tokens=64), tier.match)
    for name in "abcd":
        model.submit(request(name, prompts[name], 1))
    step = model.step()
    assert step is not None
    assert [first.request_id for first in step.first_tokens] == ["d"]
    assert [load.request_id for load in model.loads()] == ["a", "b", "c"]
    model.submit(request("d", prompts["d"], 1, attempt=2))
    for name in "cab":
        assert model.loaded(name, 2)
    assert [first.request_id for step in run(model) for first in step.first_tokens] == ["a", "b", "c", "d"]


def test_loading_requests_take_seats_and_room() -> None:
    prompts = {name: [number] * 4 + PROMPT[:13] for number, name in enumerate("abcd", 100)}
    tier = Tier(*prompts.values())
    model = EngineModel(config(max_num_seqs=3, kv_blocks_total=10, max_num_batched_tokens=64), tier.match)
    for name in "abcd":
        model.submit(request(name, prompts[name], 1))
    assert [load.request_id for load in loading(model)] == ["a", "b"]  # two blocks are free
    assert model.loaded("a", 0)
    ends = [model.step()]
    assert [end.request_id for end in finished([step for step in ends if step])] == ["a"]
    assert [load.request_id for load in loading(model)] == ["c"]
    few = EngineModel(config(max_num_seqs=1), tier.match)
    for name in "ab":
        few.submit(request(name, prompts[name], 1))
    assert [load.request_id for load in loading(few)] == ["a"]
    assert few.loaded("a", 4)
    assert [load.request_id for load in loading(few)] == ["b"]


def test_cancelled_while_it_is_loaded_it_frees_its_blocks() -> None:
    tier = Tier(PROMPT)
    model = EngineModel(config(), tier.match)
    for name in ("never-taken", "taken", "arrived"):
        model.submit(request(name, PROMPT, 1))
    assert model.step() is None
    assert model.cancel("never-taken")
    assert [load.request_id for load in model.loads()] == ["taken", "arrived"]
    assert model.cancel("taken")
    assert not model.loaded("taken", 4)
    assert model.loaded("arrived", 2)
    assert model.cancel("arrived")
    assert model.pool.used == 0
    # The blocks that arrived are in the cache, and are reported although no sequence runs.
    step = model.step()
    assert step is not None
    assert (step.duration_us, replay_cache([step])) == (0, set(hashes(PROMPT)[:2]))
    assert model.step() is None


def test_a_preempted_sequence_loads_its_own_output() -> None:
    tier = Tier()
    names: list[tuple[int, int, bytes]] = []

    def named(parent: int, block: int, token_ids: bytes) -> None:
        names.append((parent, block, token_ids))
        tier.content.add(block)  # written at once

    model = EngineModel(config(kv_blocks_total=7), tier.match, named)
    model.submit(request("a", [1] * 5, 19))
    model.submit(request("b", [2] * 5, 19, seed=8))
    steps: list[EngineStep] = []
    loads: list[Load] = []
    tier.content.update(hashes([2] * 5))
    while True:
        step = model.step()
        new = model.loads()
        for load in new:
            assert model.loaded(load.request_id, load.blocks)
        loads += new
        if step is None and not new:
            break
        steps += [step] if step else []
    assert [load.request_id for load in loads] == ["b", "b"]
    assert loads[0] == Load("b", 1, 0, 1)
    assert loads[1].first_block + loads[1].blocks > 1
    output = answers(steps)
    assert output == {"a": generate_tokens(7, 0, 19, VOCABULARY), "b": generate_tokens(8, 0, 19, VOCABULARY)}
    assert {end.request_id: end.cached_tokens for end in finished(steps)} == {"a": 0, "b": 4}
    assert replay_cache(steps) == model.pool.content()
    for name, prompt in (("a", [1] * 5), ("b", [2] * 5)):
        turn = (prompt + output[name])[:20]
        chain = hashes(turn)
        assert {one for one in names if one[1] in chain} == {
            (chain[at - 1], chain[at], pack_u32(turn[at * BLOCK : (at + 1) * BLOCK])) for at in range(1, 5)
        }


def test_blocks_whose_tokens_do_not_determine_them_are_not_named() -> None:
    names: list[int] = []
    model = EngineModel(config(), named=lambda parent, block, token_ids: names.append(block))
    model.submit(request("short", [1, 2], 6))
    run(model)
    assert names == []  # its first block has no parent
    made = request("image", [1, 2, 3, 4, 5], 8)
    model.submit(msgspec.structs.replace(made, tail_mm_hashes=(9,)))
    (step, *_) = [step for step in reversed(run(model)) if step.cache_changes]
    assert [list(change.hashes) for change in step.cache_changes] == [names]  # only the block after the image


def test_a_prefill_stage_loads_and_a_decode_stage_fetches_what_was_not_loaded() -> None:
    tier = Tier(PROMPT[:8])
    model = engine(request("a", PROMPT, 1, stage="prefill"), match=tier.match, max_num_batched_tokens=64)
    assert loading(model) == [Load("a", 1, 0, 2)]
    assert model.loaded("a", 2)
    (step,) = run(model)
    assert (step.duration_us, step.computed) == (prefill_us(10), [Computed("a", 1, 8)])

    model = engine(request("a", PROMPT, 3, stage="decode"), match=tier.match)
    assert model.fetches() == []
    assert model.step() is None
    assert model.loads() == [Load("a", 1, 0, 2)]
    assert model.loaded("a", 2)
    assert model.fetches() == [Fetch("a", 1, 2, 5)]
    assert model.fetched("a")
    steps = run(model)
    assert steps[0].first_tokens == [FirstTokenStep("a", 1, 17)]
    assert answers(steps) == {"a": generate_tokens(7, 0, 3, VOCABULARY)}
    assert replay_cache(steps) == model.pool.content()

    failing = EngineModel(config(), tier.match)
    failing.submit(request("a", PROMPT, 3, stage="decode"))
    assert failing.fetches() == []
    assert failing.loads() == [Load("a", 1, 0, 2)]
    assert failing.loaded("a", 1)
    assert failing.fetches() == [Fetch("a", 1, 1, 5)]


def test_a_cleared_cache_computes_what_was_being_loaded() -> None:
    tier = Tier(PROMPT, [9] * 12)
    model = EngineModel(config(max_num_seqs=2), tier.match)
    model.submit(request("a", PROMPT, 3))
    model.submit(request("b", [9] * 12, 3, stage="decode"))
    assert [load.request_id for load in loading(model)] == ["a", "b"]
    model.clear_cache()
    assert (model.pool.content(), model.pool.used, model.load().waiting) == (frozenset(), 0, 2)
    assert not model.loaded("a", 4)
    step = model.step()
    assert step is not None
    assert model.loads() == []
    assert model.fetches() == [Fetch("b", 1, 0, 3)]
    assert model.fetched("b")
    steps = [step, *run(model)]
    assert {end.request_id: end.cached_tokens for end in finished(steps)} == {"a": 0, "b": 11}
    assert replay_cache(steps) == model.pool.content()


def test_reset_forgets_what_is_being_loaded() -> None:
    tier = Tier(PROMPT)
    model = engine(request("a", PROMPT, 3), match=tier.match)
    assert model.step() is None
    model.reset()
    assert (model.loads(), model.loaded("a", 1), model.step(), model.pool.used) == ([], False, None, 0)
    model.submit(request("a", PROMPT, 1))
    assert [load.request_id for load in loading(model)] == ["a"]
