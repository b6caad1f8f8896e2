"""Prefill and decode workers of SGLang, with a stand-in. These roles were never run with a real SGLang."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from forebay.events.decisions import Stage
from forebay.events.transfer import Prefilled
from forebay.workers.engines.kv_descriptor import decoded
from forebay.workers.engines.sglang import engine as sglang_engine
from forebay.workers.engines.sglang.core import bootstrap_host
from forebay.workers.engines.sglang.engine import CONNECTOR, Rendezvous, SglangEngine, new_room
from tests.engines.driven import Driven
from tests.workers.conftest import until
from tests.workers.engine_setup import PROMPT, StandinPair, standin_pair
from tests.workers.standins import sglang_standin
from tests.workers.standins.little import answer_of
from tests.workers.standins.sglang_standin import Engine, TokenizerManager

Pair = StandinPair[TokenizerManager]


def started_manager() -> TokenizerManager | None:
    return None if Engine.made is None else Engine.made.tokenizer_manager


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    sglang_standin.install(monkeypatch)
    monkeypatch.setattr(Engine, "rooms", {})
    async with standin_pair(tmp_path, SglangEngine, started_manager) as both:
        yield both


def meeting(prefilled: Prefilled, tokens: int) -> Rendezvous:
    return decoded(prefilled, CONNECTOR, "m", tokens, msgspec.json.Decoder(Rendezvous).decode)


async def test_prefill_and_decode_share_a_unique_room(pair: Pair) -> None:
    prefilled = await pair.prefilled(PROMPT)
    assert (prefilled.connector, prefilled.worker_id, prefilled.tokens) == (CONNECTOR, "prefill", len(PROMPT))
    meet = meeting(prefilled, len(PROMPT))
    assert (meet.host, meet.port) == ("127.0.0.1", pair.prefill_backend.arguments["disaggregation_bootstrap_port"])
    assert meet.port != 8998, "that is every SGLang's"
    assert pair.prefill.engine.kept() == 1  # type: ignore[attr-defined]
    answer = await pair.decoded(PROMPT, prefilled)
    assert answer.tokens == answer_of(PROMPT, 6)
    for manager, tokens in ((pair.prefill_backend, 1), (pair.decode_backend, 6)):
        requested = manager.requested_with[-1]
        assert requested["bootstrap_room"] == meet.room
        assert requested["sampling_params"]["max_new_tokens"] == tokens
    await pair.nothing_kept()
    other = await pair.prefilled([9, *PROMPT])
    assert meeting(other, len(PROMPT) + 1).room != meet.room


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
    await until(lambda: [name for name, *_ in pair.prefill_backend.calls].count("abort") == 2)
    assert not pair.prefill_backend.rid_to_state


async def test_unfetchable_kv_is_reported(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled = await pair.prefilled(PROMPT)
    invalid = msgspec.structs.replace(prefilled, descriptor=b'{"host":"h","port":0,"room":1}')
    assert "cannot decode" in ((await pair.decoded(PROMPT, invalid)).not_fetched or "")
    monkeypatch.setattr(sglang_engine, "LEASE_S", 0.01)
    pair.prefill_backend.deaf = pair.decode_backend.deaf = True
    assert "no token before the lease" in ((await pair.decoded(PROMPT, prefilled)).not_fetched or "")
    assert not pair.decode_backend.rid_to_state


@pytest.mark.parametrize(("status", "fetched"), [(500, False), (400, True)])
async def test_aborted_decode_request_was_not_fetched_unless_it_is_invalid(
    pair: Pair, status: int, fetched: bool
) -> None:
    prefilled = await pair.prefilled(PROMPT)
    item = pair.decode.item(PROMPT, stage="decode", prefilled=prefilled)
    reason = {"type": "abort", "status_code": status, "message": "KVTransferError: peer is gone"}
    pair.decode_backend.abort_before[item.request_id] = reason
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
