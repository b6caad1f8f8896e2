"""Prefill and decode workers of TensorRT-LLM, with a stand-in. The real engine was never run."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.transfer import Prefilled
from forebay.workers.engine import KvEngine
from forebay.workers.engines.kv_descriptor import Unfetchable
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.tensorrt_llm import engine as tensorrt_llm_engine
from forebay.workers.engines.tensorrt_llm.engine import TensorRtLlmEngine
from forebay.workers.engines.tensorrt_llm.transfer import CONNECTOR, descriptor, transfer_fields
from tests.engines.driven import Answer, Driven, driven
from tests.workers.standins import tensorrt_llm_standin
from tests.workers.standins.little import answer_of
from tests.workers.standins.tensorrt_llm_standin import LLM, DisaggregatedParams, Logprob
from tests.workers.test_engine_contract import PROMPT, SPEC, model_directory


@dataclass
class Pair:
    prefill: Driven
    decode: Driven
    there: LLM  # the prefill worker's
    here: LLM

    async def prefilled(self, prompt: list[int], **options: Any) -> Prefilled:
        answer = await self.prefill.ask(prompt, 6, stage="prefill", **options)
        assert answer.prefilled is not None, answer
        return answer.prefilled

    async def decoded(self, prompt: list[int], prefilled: Prefilled | None, **options: Any) -> Answer:
        return await self.decode.ask(prompt, 6, stage="decode", prefilled=prefilled, **options)


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    tensorrt_llm_standin.install(monkeypatch)
    model = model_directory(tmp_path / "model")

    @asynccontextmanager
    async def started(role: Any) -> AsyncIterator[tuple[Driven, LLM]]:
        settings = EngineSettings(model=model, model_name="m", role=role, block_size=4, kv_blocks=32)
        async with driven(TensorRtLlmEngine(settings), msgspec.structs.replace(SPEC, block_size=4)) as one:
            assert LLM.made is not None
            yield one, LLM.made

    async with started("prefill") as (prefill, there), started("decode") as (decode, here):
        yield Pair(prefill, decode, there, here)


async def test_prefill_worker_generates_the_first_token(pair: Pair) -> None:
    prefilled = await pair.prefilled(PROMPT, logprobs=2, min_tokens=3)
    assert (prefilled.connector, prefilled.tokens, prefilled.model) == (CONNECTOR, len(PROMPT), "m")
    assert pair.there.asked_with[-1]["sampling_params"].max_tokens == 1
    assert pair.there.asked_with[-1]["sampling_params"].min_tokens == 3
    assert pair.there.args.disable_overlap_scheduler
    answer = await pair.decoded(PROMPT, prefilled, logprobs=2, min_tokens=3)
    assert answer.tokens == answer_of(PROMPT, 6)
    asked = pair.here.asked_with[-1]["disaggregated_params"]
    assert (asked.request_type, asked.first_gen_tokens) == ("generation_only", answer.tokens[:1])
    assert asked.opaque_state == b"state \xff of " + bytes(PROMPT[:1]), "it passes through as it is"
    assert asked.ctx_request_id == 1 << 62
    ((first),) = asked.first_gen_log_probs
    assert first[answer.tokens[0]] == Logprob(-0.5, 1)


async def test_decode_worker_computes_aggregated_prompts(pair: Pair) -> None:
    assert (await pair.decode.ask(PROMPT, 6)).tokens == answer_of(PROMPT, 6)
    assert pair.here.asked_with[-1]["disaggregated_params"] is None


async def test_unfetchable_kv_is_reported(pair: Pair) -> None:
    prefilled = await pair.prefilled(PROMPT)
    for changes, says in (
        ({"connector": "nixl"}, "its KV is transferred by nixl"),
        ({"model": "other"}, "of model other"),
        ({"tokens": 3}, "3 tokens"),
        ({"descriptor": b"\xc1"}, "cannot decode"),
        ({"descriptor": msgspec.msgpack.encode({"unknown": 1})}, "unknown"),
        ({"descriptor": msgspec.msgpack.encode({"first_gen_tokens": [1], "opaque_state": b"x"})}, "transfer failed"),
    ):
        answer = await pair.decoded(PROMPT, msgspec.structs.replace(prefilled, **changes))
        assert says in (answer.not_fetched or ""), answer
    assert "the request has no KV descriptor" in ((await pair.decoded(PROMPT, None)).not_fetched or "")
    refused = await pair.decoded(PROMPT, prefilled, top_p=1.5)
    assert refused.error is not None and refused.error.status == 400
    assert (await pair.decoded(PROMPT, prefilled)).tokens == answer_of(PROMPT, 6)


async def test_hung_transfer_ends_with_its_lease(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled = await pair.prefilled(PROMPT)
    monkeypatch.setattr(tensorrt_llm_engine, "LEASE_S", 0.01)
    pair.here.deaf = True
    assert "could not continue" in ((await pair.decoded(PROMPT, prefilled)).not_fetched or "")
    assert pair.here.aborted


async def test_prefill_needs_the_prefill_role_and_a_second_token(pair: Pair) -> None:
    answer = await pair.decode.ask(PROMPT, stage="prefill")
    assert answer.error is not None and answer.error.status == 501
    pair.there.end_after[PROMPT[0]] = "stop"
    answer = await pair.prefill.ask(PROMPT, stage="prefill")
    assert answer.error is not None and (answer.error.status, "first token ends" in answer.error.message) == (500, True)


async def test_kv_counts_as_kept_until_no_block_is_in_use(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pair.prefill.engine
    assert isinstance(engine, TensorRtLlmEngine)
    assert isinstance(engine, KvEngine)
    for prompt in (PROMPT, [9, *PROMPT]):
        await pair.prefilled(prompt)
    pair.there.step.clear()
    engine._ranks[0].report(0, 0, 0.5)
    assert engine.kept() == 2
    engine.release(list(pair.prefill.answers)[-1])
    engine.drop(kept())
    assert engine.kept() == 1
    engine._ranks[0].report(0, 0, 0.0)
    assert engine.kept() == 0


def kept(packed: bytes = b"") -> Prefilled:
    return Prefilled(
        worker_id="p", worker_epoch=1, model="m", connector=CONNECTOR, descriptor=packed, tokens=1, lease_us=1
    )


@given(packed=st.binary())
def test_invalid_descriptors_are_unfetchable(packed: bytes) -> None:
    try:
        fields = transfer_fields(kept(packed), "m", 1, Logprob)
    except Unfetchable:
        return
    assert fields["request_type"] == "generation_only"


def test_unencodable_parameters_are_unfetchable() -> None:
    strange: Any = object()
    unknown: list[Any] = [None, {}, DisaggregatedParams(opaque_state=strange)]
    for params in unknown:
        with pytest.raises(Unfetchable):
            descriptor(params)
