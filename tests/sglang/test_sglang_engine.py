"""Real SGLang: one engine for all tests of this file, so each test uses different prompts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from forebay.engine_model.model import EngineLoad
from forebay.events.control import Command
from forebay.events.requests import StructuredOutput, TokenBias
from forebay.ingress.model import Model
from forebay.processes.engines import tokenizer_probes
from forebay.workers.engine import Cleared, EngineRefused
from tests.engines.driven import Driven, driven
from tests.engines.oracle import GREEDY, Transformers
from tests.sglang.sglang_settings import ARGUMENTS, BLOCK, KV_BLOCKS, SPEC, sglang_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")
CANARY = [0] * 16


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sglang(model: Path) -> AsyncIterator[Driven]:
    arguments = ARGUMENTS | {"enable_priority_scheduling": True}
    engine = sglang_engine(model, arguments=arguments, tokenizer_probes=tokenizer_probes(Model(model)))
    async with driven(engine, SPEC) as one:
        yield one


async def idle(one: Driven) -> None:
    await one.until(lambda: one.batches[-1].load == EngineLoad(0, 0, 0, KV_BLOCKS))


async def test_events_from_before_the_first_connection_are_replayed(sglang: Driven) -> None:
    await sglang.until(lambda: sglang.blocks(CANARY) <= sglang.held[0])


async def test_greedy_tokens_equal_the_oracle(sglang: Driven, oracle: Transformers) -> None:
    answers = [await sglang.ask(prompt, len(generated)) for prompt, generated in GREEDY]
    assert [one.tokens for one in answers] == [generated for _, generated in GREEDY]
    assert max(one.chunks for one in answers) > 1
    prompt = [7 + number * 11 % 350 for number in range(300)]
    assert (await sglang.ask(prompt, 100)).tokens == oracle.greedy(prompt, 100)


async def test_concurrent_requests_are_independent(sglang: Driven) -> None:
    answers = [sglang.submit(sglang.item(prompt, len(generated))) for prompt, generated in GREEDY * 3]
    await sglang.until(lambda: all(one.over for one in answers))
    assert [one.tokens for one in answers] == [generated for _, generated in GREEDY * 3]


async def test_a_hit_in_the_cache_publishes_nothing(sglang: Driven) -> None:
    prompt = [8, *range(100, 139)]
    first = await sglang.ask(prompt, BLOCK)
    await sglang.until(lambda: sglang.blocks(prompt + first.tokens[:-1]) <= sglang.held[0])
    await idle(sglang)
    before = len(sglang.batches)
    again = await sglang.ask(prompt, BLOCK)
    assert (first.cached, again.cached, again.tokens) == (0, 2 * BLOCK, first.tokens)
    branch = [*prompt[:32], *range(300, 320)]
    assert (await sglang.ask(branch, 1)).cached == 2 * BLOCK
    await sglang.until(lambda: sglang.blocks(branch) <= sglang.held[0])
    changes = [change for batch in sglang.batches[before:] for change in batch.cache_changes]
    assert [change.hashes for change in changes if not isinstance(change, Cleared)] == [
        tuple(sglang.blocks(branch) - sglang.blocks(prompt))
    ]


async def test_tokens_have_log_probabilities(sglang: Driven) -> None:
    answer = await sglang.ask([16, 17, 18], 4, logprobs=3)
    assert len(answer.logprobs) == len(answer.tokens) == 4
    for token, one in zip(answer.tokens, answer.logprobs, strict=True):
        assert len(one.top) == 3
        assert (one.top[0].token_id, one.top[0].logprob) == (token, one.logprob)  # greedy
        assert 0 >= one.top[0].logprob >= one.top[1].logprob >= one.top[2].logprob
    bare = await sglang.ask([16, 17, 18], 4, logprobs=0)
    values = [one.logprob for one in answer.logprobs]
    assert [one.logprob for one in bare.logprobs] == pytest.approx(values, abs=1e-4)
    assert not any(one.top for one in bare.logprobs)
    assert not (await sglang.ask([16, 17, 18], 4)).logprobs


async def test_sampling_is_passed_on(sglang: Driven) -> None:
    prompt = [19, 20, 21]
    greedy = await sglang.ask(prompt, 6)
    stop = max(greedy.tokens, key=greedy.tokens.index)
    stopped = await sglang.ask(prompt, 6, stop_token_ids=(stop,), ignore_eos=False)
    assert stopped.tokens == greedy.tokens[: greedy.tokens.index(stop) + 1]
    assert stopped.finished is not None and stopped.finished.reason == "stop"
    longer = await sglang.ask(prompt, 6, stop_token_ids=(greedy.tokens[0],), min_tokens=4, ignore_eos=False)
    assert len(longer.tokens) >= 4 and greedy.tokens[0] not in longer.tokens[:4]
    forced = await sglang.ask(prompt, 3, logit_bias=(TokenBias(token_id=77, bias=100.0),))
    assert forced.tokens == [77, 77, 77]
    assert (await sglang.ask(prompt, 6, temperature=1.0, top_k=1)).tokens == greedy.tokens
    assert (await sglang.ask(prompt, 6, seed=5)).tokens == greedy.tokens
    varied = [tuple((await sglang.ask(prompt, 12, temperature=1.0, min_p=0.001)).tokens) for _ in range(3)]
    assert len(set(varied)) > 1


async def test_output_matches_the_requested_structure(sglang: Driven, model: Path) -> None:
    decode = Model(model).tokenizer.decode
    kinds = {
        "choice": '["alpha", "beta"]', "regex": "[xy]{3}z", "json_schema": '{"enum": ["only"]}',
        "grammar": 'root ::= "yes" | "no"',
    }  # fmt: skip
    texts = {}
    for kind, text in kinds.items():
        structured = StructuredOutput(kind=kind, text=text)  # type: ignore[arg-type]
        answer = await sglang.ask([22, 23], 40, structured=structured, ignore_eos=False)
        assert answer.finished is not None, answer.error
        assert answer.finished.reason == "stop"
        texts[kind] = decode(answer.tokens, skip_special_tokens=True)
    assert texts["choice"] in ("alpha", "beta")
    assert texts["regex"][:3].strip("xy") == "" and texts["regex"][3:] == "z"
    assert texts["json_schema"] == '"only"'
    assert texts["grammar"] in ("yes", "no")


async def test_a_response_ends_with_the_context(sglang: Driven) -> None:
    answer = await sglang.ask([26, *[5] * 999], 100)
    assert answer.finished is not None and answer.finished.reason == "length"
    assert len(answer.tokens) == 22  # of 24: SGLang leaves two tokens of the context free


@pytest.mark.parametrize(
    ("options", "status", "code", "fragment"),
    [
        ({"prompt": [5] * 1024}, 400, "context_length_exceeded", "1024 tokens"),
        ({"prompt": []}, 400, "invalid_request", ""),
        ({"prompt": [100_000]}, 400, "invalid_request", "100000"),
        ({"top_p": 3.0}, 400, "invalid_request", "top_p"),
        ({"temperature": 1.0, "seed": 5}, 400, "unsupported_parameter", "enable_deterministic_inference"),
        ({"stop_token_ids": (5,)}, 400, "unsupported_parameter", "ignore_eos"),
        ({"structured": StructuredOutput(kind="choice", text="{}")}, 400, "invalid_request", "choices"),
        ({"structured": StructuredOutput(kind="json_schema", text="{")}, 400, "invalid_request", ""),
        ({"task": "embed"}, 400, "invalid_request", "embed"),
        ({"lora_name": "nobody"}, 404, "model_not_found", "nobody"),
    ],
)
async def test_unsupported_requests_are_refused(
    sglang: Driven, options: dict[str, Any], status: int, code: str, fragment: str
) -> None:
    answer = await sglang.ask(**({"prompt": [24]} | options))
    assert answer.error is not None
    assert (answer.error.status, answer.error.code) == (status, code), answer.error
    assert fragment in answer.error.message
    assert "\n" not in answer.error.message
    assert (await sglang.ask([24], 1)).finished is not None


async def test_aborted_requests_free_their_blocks(sglang: Driven) -> None:
    """While prompts are computed, while tokens are generated, and while requests wait."""
    prompt, generated = GREEDY[2]
    answers = [sglang.submit(sglang.item([25, number, *range(100, 180)], 400)) for number in range(12)]
    await sglang.until(lambda: answers[0].tokens)
    for one in answers:
        sglang.engine.cancel(one.item.request_id)
    await sglang.engine.check()  # its process has received the cancellations
    await idle(sglang)
    counts = [len(one.tokens) for one in answers]
    assert (await sglang.ask(prompt, len(generated))).tokens == generated
    await idle(sglang)
    assert [len(one.tokens) for one in answers] == counts and not any(one.over for one in answers)
    await sglang.engine.check()


async def test_load_is_reported(sglang: Driven) -> None:
    before = len(sglang.batches)
    answers = [sglang.submit(sglang.item([28, start] * 20, 120)) for start in range(10)]

    def reported(is_full: Callable[[Any], bool]) -> bool:
        return any(is_full(batch.load) for batch in sglang.batches[before:])

    # SGLang updates its load every few steps, so the responses run until it was seen.
    await sglang.until(lambda: reported(lambda load: load.running == 8 and load.waiting >= 1))  # max_num_seqs
    assert reported(lambda load: load.kv_blocks_used in range(8, KV_BLOCKS + 1))
    for one in answers:
        sglang.engine.cancel(one.item.request_id)
    await idle(sglang)


async def test_higher_priorities_run_first(sglang: Driven) -> None:
    low = [sglang.submit(sglang.item([29, number], 120)) for number in range(12)]
    high = sglang.submit(sglang.item([29, 99], 1, priority=5))
    await sglang.until(lambda: all(one.over for one in (*low, high)))
    began = [first.request_id for batch in sglang.batches for first in batch.first_tokens]
    assert began.index(high.item.request_id) < max(began.index(one.item.request_id) for one in low)


async def test_clear_is_reported(sglang: Driven) -> None:
    prompt = [30, *range(100, 195)]
    await sglang.ask(prompt, 1)
    await sglang.until(lambda: sglang.blocks(prompt) <= sglang.held[0])
    await sglang.engine.command(Command(action="clear_kv_blocks"))
    await sglang.until(lambda: not sglang.held[0])
    assert not sglang.engine.held(0)
    assert (await sglang.ask(prompt, 1)).cached == 0
    await sglang.until(lambda: sglang.held[0] == sglang.blocks(prompt))


async def test_clear_during_a_response_loses_no_token(sglang: Driven, oracle: Transformers) -> None:
    prompt = [31, *range(100, 195)]
    answer = sglang.submit(sglang.item(prompt, 200))
    await sglang.until(lambda: answer.tokens)
    await sglang.engine.command(Command(action="clear_kv_blocks"))
    await sglang.until(lambda: answer.over)
    assert answer.tokens == oracle.greedy(prompt, 200)
    await sglang.until(lambda: sglang.blocks(prompt) <= sglang.held[0])


async def test_a_paused_engine_resumes(sglang: Driven, oracle: Transformers) -> None:
    prompt = [33, *range(100, 150)]
    answer = sglang.submit(sglang.item(prompt, 200))
    await sglang.until(lambda: answer.tokens)
    await sglang.engine.command(Command(action="pause"))
    waits = sglang.submit(sglang.item(GREEDY[0][0], 8))
    await sglang.engine.check()
    assert not answer.over and not waits.tokens
    await sglang.engine.command(Command(action="resume"))
    await sglang.until(lambda: answer.over and waits.over)
    assert (answer.tokens, waits.tokens) == (oracle.greedy(prompt, 200), GREEDY[0][1])


async def test_reset_drops_requests_and_cache(sglang: Driven) -> None:
    prompt = [34, *range(100, 195)]
    under_way = sglang.submit(sglang.item(prompt, 900))
    await sglang.until(lambda: under_way.tokens)
    sglang.engine.reset()
    sglang.held[0].clear()  # as the owner does
    generated = len(under_way.tokens)
    assert not sglang.engine.held(0)
    assert (await sglang.ask(prompt, 4)).cached == 0
    assert len(under_way.tokens) == generated and not under_way.over
    await sglang.until(lambda: sglang.held[0] == sglang.blocks(prompt))


async def test_commands_that_need_other_arguments_are_refused(sglang: Driven, tmp_path: Path) -> None:
    load = Command(action="load_lora", lora_name="x", lora_path=str(tmp_path))
    for command, argument in ((Command(action="sleep"), "enable_memory_saver"), (load, "enable_lora")):
        with pytest.raises(EngineRefused, match=argument):
            await sglang.engine.command(command)


async def test_engine_metrics_are_exported(sglang: Driven) -> None:
    async with asyncio.timeout(60):
        while not sglang.metric("sglang:generation_tokens_total"):  # a check reads them
            await sglang.engine.check()
    names = {
        sample.name
        for collector in sglang.engine.collectors()
        for family in collector.collect()
        for sample in family.samples
    }
    assert {"sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"} <= names
    assert {"sglang:prompt_tokens_total", "sglang:cached_tokens_total", "forebay_worker_kv_events_total"} <= names
    assert all(name.startswith(("sglang:", "forebay_worker_kv_events")) for name in names)
