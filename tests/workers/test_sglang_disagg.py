"""Prefill and decode workers of SGLang, with a stand-in. These roles were never run with a real SGLang."""

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.decisions import Stage
from forebay.events.transfer import Prefilled
from forebay.workers.engine import KvEngine
from forebay.workers.engines.kv_descriptor import Unfetchable
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.sglang import core as sglang_core
from forebay.workers.engines.sglang import engine as sglang_engine
from forebay.workers.engines.sglang.core import bootstrap_host
from forebay.workers.engines.sglang.engine import SglangEngine
from forebay.workers.engines.sglang.transfer import CONNECTOR, LEASE_S, new_room, rendezvous
from tests.engines.driven import Answer, Driven, driven
from tests.workers.conftest import until
from tests.workers.standins import sglang_standin
from tests.workers.standins.little import answer_of
from tests.workers.standins.sglang_standin import Engine, TokenizerManager
from tests.workers.test_engine_contract import PROMPT, SPEC, model_directory


class Free:
    """Lock that lets several stand-ins run in one process."""

    def acquire(self, *, blocking: bool) -> bool:
        return not blocking

    def release(self) -> None:
        """Nothing is held."""


@dataclass
class Pair:
    prefill: Driven
    decode: Driven
    there: TokenizerManager  # the prefill worker's
    here: TokenizerManager

    async def prefilled(self, prompt: list[int], **options: Any) -> Prefilled:
        answer = await self.prefill.ask(prompt, 6, stage="prefill", **options)
        assert answer.prefilled is not None, answer
        return answer.prefilled

    async def decoded(self, prompt: list[int], prefilled: Prefilled | None, **options: Any) -> Answer:
        return await self.decode.ask(prompt, 6, stage="decode", prefilled=prefilled, **options)

    async def nothing_kept(self) -> None:
        engine = self.prefill.engine
        assert isinstance(engine, KvEngine)
        await until(lambda: not engine.kept())


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    sglang_standin.install(monkeypatch)
    monkeypatch.setattr(sglang_core, "_TAKEN", Free())
    monkeypatch.setattr(Engine, "rooms", {})
    model = model_directory(tmp_path / "model")
    managers, workers = [], []
    async with AsyncExitStack() as stack:
        for role in ("prefill", "decode"):
            settings = EngineSettings(model=model, model_name="m", role=role, block_size=4, kv_blocks=32)
            spec = msgspec.structs.replace(SPEC, worker_id=role, block_size=4)
            workers.append(await stack.enter_async_context(driven(SglangEngine(settings), spec)))
            assert Engine.made is not None and Engine.made.tokenizer_manager is not None
            managers.append(Engine.made.tokenizer_manager)
        yield Pair(workers[0], workers[1], managers[0], managers[1])


async def test_prefill_and_decode_share_a_unique_room(pair: Pair) -> None:
    prefilled = await pair.prefilled(PROMPT)
    assert (prefilled.connector, prefilled.worker_id, prefilled.tokens) == (CONNECTOR, "prefill", len(PROMPT))
    meet = rendezvous(prefilled, "m", len(PROMPT))
    assert (meet.host, meet.port) == ("127.0.0.1", pair.there.arguments["disaggregation_bootstrap_port"])
    assert meet.port != 8998, "that is every SGLang's"
    assert pair.prefill.engine.kept() == 1  # type: ignore[attr-defined]
    answer = await pair.decoded(PROMPT, prefilled)
    assert answer.tokens == answer_of(PROMPT, 6)
    for manager, tokens in ((pair.there, 1), (pair.here, 6)):
        asked = manager.asked_with[-1]
        assert asked["bootstrap_room"] == meet.room
        assert asked["sampling_params"]["max_new_tokens"] == tokens
    await pair.nothing_kept()
    other = await pair.prefilled([9, *PROMPT])
    assert rendezvous(other, "m", len(PROMPT) + 1).room != meet.room


async def test_unfetched_prompt_is_cancelled(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pair.prefill.engine
    assert isinstance(engine, SglangEngine)
    await pair.prefilled(PROMPT)
    engine.release("another")
    engine.drop(
        Prefilled(worker_id="p", worker_epoch=1, model="m", connector="x", descriptor=b"", tokens=1, lease_us=1)
    )
    assert engine.kept() == 1
    engine.release(list(pair.prefill.answers)[-1])
    await pair.nothing_kept()
    monkeypatch.setattr(sglang_engine, "LEASE_S", 0.01)
    await pair.prefilled(PROMPT)
    await pair.nothing_kept()
    await until(lambda: [name for name, *_ in pair.there.calls].count("abort") == 2)
    assert not pair.there.rid_to_state


async def test_unfetchable_kv_is_reported(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled = await pair.prefilled(PROMPT)
    for changes, says in (
        ({"connector": "nixl"}, "its KV is transferred by nixl"),
        ({"model": "other"}, "of model other"),
        ({"tokens": 3}, "3 tokens"),
        ({"descriptor": b'{"host":"h","port":0,"room":1}'}, "cannot decode"),
    ):
        answer = await pair.decoded(PROMPT, msgspec.structs.replace(prefilled, **changes))
        assert says in (answer.not_fetched or ""), answer
    assert "the request has no KV descriptor" in ((await pair.decoded(PROMPT, None)).not_fetched or "")
    monkeypatch.setattr(sglang_engine, "LEASE_S", 0.01)
    pair.there.deaf = pair.here.deaf = True
    assert "no token before the lease" in ((await pair.decoded(PROMPT, prefilled)).not_fetched or "")
    assert not pair.here.rid_to_state


@pytest.mark.parametrize(("status", "fetched"), [(500, False), (400, True)])
async def test_aborted_decode_request_was_not_fetched_unless_it_is_invalid(
    pair: Pair, status: int, fetched: bool
) -> None:
    prefilled = await pair.prefilled(PROMPT)
    item = pair.decode.item(PROMPT, stage="decode", prefilled=prefilled)
    reason = {"type": "abort", "status_code": status, "message": "KVTransferError: peer is gone"}
    pair.here.abort_before[item.request_id] = reason
    answer = pair.decode.submit(item)
    await pair.decode.until(lambda: answer.over)
    text = answer.not_fetched if answer.error is None else answer.error.message
    assert "peer is gone" in (text or "")
    assert (answer.error is not None) == fetched
    refused = await pair.decoded(PROMPT, await pair.prefilled(PROMPT), top_p=1.5)
    assert refused.error is not None and refused.error.status == 400


async def test_other_stages_are_refused(pair: Pair) -> None:
    others: tuple[tuple[Driven, Stage], ...] = (
        (pair.prefill, "aggregated"),
        (pair.prefill, "decode"),
        (pair.decode, "prefill"),
    )
    for one, stage in others:
        answer = await one.ask(PROMPT, stage=stage)
        assert answer.error is not None and answer.error.status == 501
    alone = await pair.decode.ask(PROMPT)
    assert alone.error is not None and "computes no prompts" in alone.error.message


def test_rooms_encode_the_rank() -> None:
    rooms = [new_room(rank, 3) for rank in (0, 1, 2) * 20]
    assert [room % 3 for room in rooms] == [0, 1, 2] * 20
    assert len(set(rooms)) == len(rooms)


def test_bootstrap_host(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_standin.install(monkeypatch)
    assert bootstrap_host({"dist_init_addr": "10.0.0.1:5000"}) == "10.0.0.1"
    assert bootstrap_host({}) == "127.0.0.1"
    older = ModuleType("sglang.srt.utils")
    setattr(older, "get_local_ip_auto", lambda: "fd00::1")  # noqa: B010
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", older)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils.network", None)
    assert bootstrap_host({}) == "[fd00::1]"


@given(packed=st.binary())
def test_invalid_descriptors_are_unfetchable(packed: bytes) -> None:
    prefilled = Prefilled(
        worker_id="p",
        worker_epoch=1,
        model="m",
        connector=CONNECTOR,
        descriptor=packed,
        tokens=1,
        lease_us=int(LEASE_S * 1e6),
    )
    with pytest.raises(Unfetchable):
        rendezvous(prefilled, "m", 1)
