"""Prefill and decode stages of the vLLM engine, with a stand-in: descriptors, leases and ports."""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.decisions import Stage
from forebay.events.transfer import DESCRIPTOR_BYTES_MAX, KvLayout, Prefilled
from forebay.workers.engine import AttemptFailed, EngineError, KvEngine
from forebay.workers.engines import model_engine
from forebay.workers.engines.kv_descriptor import Unfetchable
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm import core as vllm_core
from forebay.workers.engines.vllm import transfer as vllm_transfer
from forebay.workers.engines.vllm.core import VllmCore, require_nixl
from forebay.workers.engines.vllm.engine import CANARY_ID, VllmEngine
from forebay.workers.engines.vllm.extension import KvLeases
from forebay.workers.engines.vllm.transfer import CONNECTOR, EXPIRES, transfer_params
from tests.engines.driven import Answer, Driven, driven
from tests.workers.conftest import until
from tests.workers.hosted import HOSTED_SPEC

SPEC = msgspec.structs.replace(HOSTED_SPEC, worker_id="w", block_size=1)
BLOCK = 32
PROMPT = 40  # tokens
TOLD = {  # by vLLM 0.32, of a prompt of two blocks
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": ([4, 5],),
    "remote_engine_id": "engine",
    "remote_request_id": "r1-abcd",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": PROMPT,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 32,
}
KEPT = TOLD | {EXPIRES: 1e9}


class VLLMError(Exception):
    """Base class of vLLM's errors."""


class TransferConfig:
    """`kv_lease_duration` is `lease_s`."""

    kv_connector = "NixlConnector"
    lease_s = 20.0

    @property
    def kv_connector_extra_config(self) -> dict[str, float]:
        return {"kv_lease_duration": self.lease_s}


class Llm:
    """`AsyncLLM` with a KV connector. `answer` is the output of the next request; None blocks it."""

    errored = False

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(policy="fcfs", max_num_seqs=8, max_num_batched_tokens=64),
            model_config=SimpleNamespace(
                skip_tokenizer_init=True,
                max_model_len=64,
                dtype="torch.bfloat16",
                get_total_num_hidden_layers=lambda: 3,
            ),
            cache_config=SimpleNamespace(
                num_gpu_blocks=9, block_size=BLOCK, enable_prefix_caching=False, cache_dtype="auto"
            ),
            kv_transfer_config=TransferConfig(),
            lora_config=None,
        )
        self.answer: Any = output([5], "length")
        self.requested: list[Any] = []
        self.trace_headers: list[Any] = []
        self.calls: list[tuple[str, Any]] = []
        self.broken: Exception | None = None
        self.make_logger: Any = None
        self.cleared = asyncio.Event()
        self.abandoned = asyncio.Event()

    async def is_tracing_enabled(self) -> bool:
        return True

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
        self.requested.append(params)
        self.trace_headers.append(options.get("trace_headers"))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None and request_id != CANARY_ID:
            try:
                await asyncio.Event().wait()
            finally:
                self.abandoned.set()
        yield self.answer

    async def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((name, args))
        if self.broken is not None:
            raise self.broken
        return [(1_000, 3, True), (1_000, 3, True)] if name == "forebay_block_bytes" else [1, 1]

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, params: dict[str, Any], *, data_parallel_rank: int | None = None
    ) -> None:
        self.calls.append((request_id, params))

    async def reset_prefix_cache(self, **_: bool) -> bool:
        self.cleared.set()
        return True

    def report_usage(self, usage: float) -> None:
        """Report the share of KV blocks in use, as vLLM does after a step."""
        stats = SimpleNamespace(
            num_running_reqs=0,
            num_waiting_reqs=0,
            num_skipped_waiting_reqs=0,
            kv_cache_usage=usage,
            kv_connector_stats=None,
        )
        self.make_logger(None, 0).record(stats, None)


def output(token_ids: list[int], why: str | None, **fields: Any) -> SimpleNamespace:
    places = [{token_id: SimpleNamespace(logprob=-1.0, rank=1)} for token_id in token_ids]
    one = SimpleNamespace(token_ids=token_ids, logprobs=places, finish_reason=why)
    generated = {"kv_transfer_params": None, "metrics": None, "num_cached_tokens": 32, **fields}
    return SimpleNamespace(outputs=[one], finished=why is not None, **generated)


def kept(**fields: Any) -> Prefilled:
    given: dict[str, Any] = {
        "worker_id": "p",
        "worker_epoch": 3,
        "model": "m",
        "connector": CONNECTOR,
        "tokens": PROMPT,
    }
    return Prefilled(**given | {"lease_us": 10_000_000, "descriptor": msgspec.json.encode(KEPT)} | fields)


async def run(one: Driven, stage: Stage, prefilled: Prefilled | None = None) -> Answer:
    return await one.ask(range(PROMPT), 9, stage=stage, prefilled=prefilled, min_tokens=4, logprobs=2)


@pytest.fixture
def llm() -> Llm:
    return Llm()


@contextlib.asynccontextmanager
async def running(llm: Llm, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Driven]:
    async def start(_: VllmCore, arguments: Any, logger: Any, channel: Any) -> Llm:
        llm.make_logger = logger
        return llm

    calls = SimpleNamespace(
        EngineDeadError=type("EngineDeadError", (Exception,), {}),
        VLLMError=VLLMError,
        request_error=lambda error: AttemptFailed(500, "engine_error", str(error)),
        sampling_params=lambda sampling, transfer=None, _hints=None: (sampling, transfer),
    )
    monkeypatch.setattr(VllmCore, "start", start)
    monkeypatch.setattr(model_engine, "check_model", lambda _: None)
    monkeypatch.setattr(vllm_core, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "forebay.workers.engines.vllm.calls", calls)
    engine = VllmEngine(EngineSettings(model=Path("/m"), model_name="m", role="prefill"))
    async with driven(engine, SPEC) as one:
        yield one


@pytest.fixture
async def one(llm: Llm, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Driven]:
    async with running(llm, monkeypatch) as engine:
        yield engine


async def test_layout_covers_all_tensor_parallel_workers(one: Driven) -> None:
    assert isinstance(one.engine, KvEngine)
    expected = KvLayout(connector=CONNECTOR, dtype="bfloat16", block_bytes=2_000, layers=3)
    assert one.spec.kv_layout == expected


async def test_prompt_is_offered_with_its_remaining_lease(one: Driven, llm: Llm) -> None:
    computed = SimpleNamespace(last_token_ts=time.monotonic() - 4.0)
    llm.answer = output([5], "length", kv_transfer_params=TOLD, metrics=computed)
    offered = (await run(one, "prefill")).prefilled
    assert offered is not None
    assert (offered.worker_id, offered.worker_epoch, offered.model, offered.connector) == ("w", 1, "m", CONNECTOR)
    assert (offered.tokens, offered.bytes) == (PROMPT, 2 * 2_000)
    assert 10.0 < offered.lease_us / 1e6 <= 11.0, "20 s, 4 of which are over, and in 5 it is not read"
    sampling, transfer = llm.requested[-1]
    assert (sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (1, 0, None)
    assert transfer == {"do_remote_decode": True, "do_remote_prefill": False}
    reported = msgspec.json.decode(offered.descriptor)
    assert 15.0 < reported.pop(EXPIRES) - time.perf_counter() <= 16.0
    assert reported == {name: value for name, value in KEPT.items() if name != EXPIRES} | {"remote_block_ids": [[4, 5]]}

    llm.answer = output([6], "length")
    assert (await run(one, "decode", offered)).tokens == [6]
    sampling, transfer = llm.requested[-1]
    assert (sampling.max_tokens, sampling.logprobs) == (9, 2)
    assert (transfer["do_remote_prefill"], transfer["remote_block_ids"]) == (True, [[4, 5]])
    assert transfer["remote_prefill_cached_tokens"] is None, "the client gets the count of the prefill worker"


@pytest.mark.parametrize(
    ("fields", "age_s", "fragment"),
    [
        ({"remote_port": None}, 0.0, "unknown kv_transfer_params"),
        ({"remote_block_ids": "all"}, 0.0, "unknown kv_transfer_params"),
        ({"more": "x" * DESCRIPTOR_BYTES_MAX}, 0.0, "bytes"),
        ({}, 16.0, "its lease had already expired"),
    ],
)
async def test_unusable_transfer_parameters_fail_the_prefill(
    fields: dict[str, Any], age_s: float, fragment: str, one: Driven, llm: Llm
) -> None:
    computed = SimpleNamespace(last_token_ts=time.monotonic() - age_s)
    llm.answer = output([5], "length", kv_transfer_params=TOLD | fields, metrics=computed)
    error = (await run(one, "prefill")).error
    assert error is not None and error.status == 500 and fragment in error.message


@pytest.mark.parametrize(
    ("stage", "answer", "status"),
    [
        ("prefill", ([5], "length"), 501),  # without KV
        ("prefill", ([], "abort"), 503),
        ("aggregated", ([], "error"), 500),
    ],
)
async def test_outputs_that_are_errors(
    stage: Stage, answer: tuple[list[int], str], status: int, one: Driven, llm: Llm
) -> None:
    llm.answer = output(*answer)
    error = (await run(one, stage)).error
    assert error is not None and error.status == status
    llm.answer = output([], "error")
    failed = await run(one, "decode", kept())
    assert failed.not_fetched is not None and "could not load" in failed.not_fetched
    assert not any(batch.first_tokens for batch in one.batches)


async def test_unexpected_exception_fails_only_its_request(one: Driven, llm: Llm) -> None:
    llm.answer = AttributeError("'list' object has no attribute 'get'")
    error = (await run(one, "aggregated")).error
    assert error is not None and error.message == str(llm.answer)
    llm.answer = output([5], "length")
    assert (await run(one, "aggregated")).tokens == [5]
    await one.engine.check()


async def test_response_after_the_lease_is_discarded(llm: Llm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_transfer, "UNREAD_S", 0.0)
    async with running(llm, monkeypatch) as one:
        llm.answer = None
        late = await run(one, "decode", kept(lease_us=1_000))
        assert late.not_fetched is not None and "before the lease" in late.not_fetched
        async with asyncio.timeout(20):
            await llm.abandoned.wait()
            await llm.cleared.wait()  # what came late may be in the cache


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Timeout]:
    """The timeouts of the requests with the KV `kept()`."""
    found: list[asyncio.Timeout] = []
    limited = asyncio.timeout

    def timeout(delay_s: float | None) -> asyncio.Timeout:
        limit = limited(delay_s)
        if delay_s == kept().lease_us / 1e6 + vllm_transfer.UNREAD_S:
            found.append(limit)
        return limit

    monkeypatch.setattr(asyncio, "timeout", timeout)
    return found


async def test_response_may_outlast_the_lease_after_its_first_token(
    llm: Llm, leases: list[asyncio.Timeout], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        assert [lease.when() is None for lease in leases] == [False]
        yield output([5], None)
        assert [lease.when() for lease in leases] == [None], "the first token is there"
        yield output([6], "length")

    async with running(llm, monkeypatch) as one:
        monkeypatch.setattr(llm, "generate", generate)
        assert (await run(one, "decode", kept())).tokens == [5, 6]


class Fetch:
    """A generation of vLLM that emits or raises `result` once `arrived` is set, and then waits until it is aborted."""

    def __init__(self, llm: Llm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self.aborted = asyncio.Event(), asyncio.Event()
        self.started = 0
        self.result: Any = output([5], None)
        monkeypatch.setattr(llm, "generate", self.generate)
        monkeypatch.setattr(VllmEngine, "ABORT_WITHIN_S", 3600.0)

    async def generate(self, _prompt: Any, _params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        if request_id == CANARY_ID:
            yield output([5], "length")
            return
        self.started += 1
        try:
            await self.arrived.wait()
            if isinstance(self.result, Exception):
                raise self.result
            yield self.result
            await asyncio.Event().wait()
        finally:
            self.aborted.set()

    async def submitted(self, one: Driven, stage: Stage = "decode") -> Answer:
        before = self.started
        answer = one.submit(one.item(range(PROMPT), 9, stage=stage, prefilled=kept()))
        await until(lambda: self.started > before)
        return answer


@pytest.fixture
def fetch(llm: Llm, monkeypatch: pytest.MonkeyPatch) -> Fetch:
    return Fetch(llm, monkeypatch)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_cancelled_request_is_aborted_after_its_kv_has_arrived(fetch: Fetch, one: Driven, llm: Llm) -> None:
    answer = await fetch.submitted(one)
    for _ in range(2):
        one.engine.cancel(answer.item.request_id)
    await settle()
    assert not fetch.aborted.is_set()
    one.engine.submit(msgspec.structs.replace(answer.item, attempt=2))  # does not wait for the cancelled attempt
    await until(lambda: fetch.started == 2)
    fetch.arrived.set()
    await until(lambda: fetch.aborted.is_set() and answer.tokens)
    assert answer.chunks == 1 and {first.attempt for batch in one.batches for first in batch.first_tokens} == {2}
    fetch.aborted.clear()
    one.engine.cancel(answer.item.request_id)  # after its first token
    await settle()
    assert fetch.aborted.is_set() and not answer.over and not llm.cleared.is_set()


async def test_request_without_a_transfer_is_aborted_at_once(fetch: Fetch, one: Driven) -> None:
    answer = await fetch.submitted(one, "aggregated")
    one.engine.cancel(answer.item.request_id)
    await settle()
    assert fetch.aborted.is_set()


@pytest.mark.parametrize("ends", ["lease", "limit"])
async def test_abort_does_not_wait_for_kv_that_never_arrives(
    ends: str, llm: Llm, fetch: Fetch, leases: list[asyncio.Timeout], monkeypatch: pytest.MonkeyPatch
) -> None:
    if ends == "limit":
        monkeypatch.setattr(VllmEngine, "ABORT_WITHIN_S", 0.0)
    async with running(llm, monkeypatch) as one:
        answer = await fetch.submitted(one)
        one.engine.cancel(answer.item.request_id)
        if ends == "lease":
            leases[0].reschedule(0.0)
        await until(fetch.aborted.is_set)
        await settle()
        assert not answer.over
        # What was read after the end of the lease may be in the cache.
        assert llm.cleared.is_set() == (ends == "lease")


async def test_cancelled_request_reports_no_failure(fetch: Fetch, one: Driven, llm: Llm) -> None:
    for result in (output([], "error"), VLLMError("wrong"), AttemptFailed(400, "invalid_request", "wrong")):
        fetch.arrived.clear()
        fetch.aborted.clear()
        fetch.result = result
        answer = await fetch.submitted(one)
        one.engine.cancel(answer.item.request_id)
        fetch.arrived.set()
        await until(fetch.aborted.is_set)
        await settle()
        assert not answer.over
    fetch.arrived.clear()
    fetch.result = sys.modules["forebay.workers.engines.vllm.calls"].EngineDeadError()
    one.engine.cancel((await fetch.submitted(one)).item.request_id)
    fetch.arrived.set()
    await until(lambda: one.ended)
    assert isinstance(one.ended, EngineError)


async def test_reset_clears_the_cache_after_kv_has_arrived(fetch: Fetch, one: Driven, llm: Llm) -> None:
    answer = await fetch.submitted(one)
    one.engine.reset()
    await settle()
    assert not (fetch.aborted.is_set() or llm.cleared.is_set())
    fetch.arrived.set()
    await until(llm.cleared.is_set)
    assert fetch.aborted.is_set() and not (answer.over or answer.tokens)


async def test_stop_does_not_wait_for_kv(llm: Llm, fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(llm, monkeypatch) as one:
        one.engine.cancel((await fetch.submitted(one)).item.request_id)
    assert fetch.aborted.is_set()


async def test_vllm_gets_the_trace_context_of_a_request(one: Driven, llm: Llm) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await one.ask([1, 2, 3], 1, traceparent=trace)
    await one.ask([1, 2, 3], 1)
    assert llm.trace_headers[-2:] == [{"traceparent": trace}, None]


async def test_releases_and_drops_are_passed_to_vllm(one: Driven, llm: Llm, caplog: pytest.LogCaptureFixture) -> None:
    llm.answer = output([5], "length", kv_transfer_params=TOLD)
    assert isinstance(one.engine, VllmEngine)
    first = (await run(one, "prefill")).item.request_id
    llm.report_usage(0.5)
    assert one.engine.kept() == 1
    before = len(llm.calls)
    one.engine.release("another")
    one.engine.cancel(first)
    one.engine.release(first)
    one.engine.drop(kept())
    one.engine.drop(kept(model="other"))
    await until(lambda: len(llm.calls) == before + 2 and "of model other" in caplog.text)
    (release, (names, within_s)), (drop, params) = llm.calls[before:]
    assert (release, names) == ("forebay_release", ["r1-abcd"])
    assert 0 < within_s < 20.0
    assert drop == "drop-r1-abcd"
    assert (params["do_remote_prefill"], params["remote_block_ids"]) == (True, [[4, 5]])
    assert one.engine.kept() == 0

    second = (await run(one, "prefill")).item.request_id
    llm.report_usage(0.5)
    llm.broken = VLLMError("no such method")
    one.engine.release(second)
    await until(lambda: "no such method" in caplog.text)

    await run(one, "prefill")
    llm.report_usage(0.5)
    assert one.engine.kept() == 1
    llm.report_usage(0.0)
    assert one.engine.kept() == 0, "no block is in use"


async def test_lease_that_is_too_short_is_rejected(llm: Llm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransferConfig, "lease_s", 5.0)
    with pytest.raises(EngineError, match="expected more than 5 s"):
        async with running(llm, monkeypatch):
            pass


async def test_other_worker_extension_has_no_layout(
    llm: Llm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm.broken = VLLMError("no such method")
    with caplog.at_level(logging.WARNING):
        async with running(llm, monkeypatch) as one:
            assert one.spec.kv_layout is None
    assert "cannot read the KV layout" in caplog.text


async def test_prefill_and_decode_roles_need_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_engine, "check_model", lambda _: None)
    monkeypatch.setattr(vllm_core, "find_spec", lambda _: None)
    engine = VllmEngine(EngineSettings(model=Path("/m"), model_name="m", role="decode"))
    with pytest.raises(EngineError, match="pip install nixl"):
        await engine.start(SPEC)
    await engine.stop()
    own = {"kv_transfer_config": {"kv_connector": "Mine"}}
    require_nixl(EngineSettings(model=Path("/m"), model_name="m", role="decode", arguments=own))


@given(
    name=st.sampled_from(sorted(KEPT)),
    value=st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.lists(st.integers())),
)
def test_descriptor_fields_are_validated(name: str, value: Any) -> None:
    reported = KEPT | {name: value}
    try:
        params = transfer_params(kept(descriptor=msgspec.json.encode(reported)), "m", PROMPT, BLOCK)
    except Unfetchable:
        return
    assert 1 <= params["remote_port"] <= 65_535
    assert params["remote_num_tokens"] == PROMPT
    assert max(map(len, params["remote_block_ids"])) == 2
    assert all(block >= 0 for group in params["remote_block_ids"] for block in group)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)


def test_prompts_of_other_lengths_are_not_fetched() -> None:
    for prefilled, tokens, block, fragment in (
        (kept(tokens=39), 39, BLOCK, "covers 40 tokens, the prompt has 39"),
        (kept(), PROMPT, 16, "2 blocks, the prompt has 3"),
    ):
        with pytest.raises(Unfetchable, match=fragment):
            transfer_params(prefilled, "m", tokens, block)


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Install the worker side of a connector in vLLM; None for a vLLM without one."""

    def put(worker: Any) -> None:
        module = ModuleType("vllm.distributed.kv_transfer")
        setattr(module, "has_kv_transfer_group", lambda: worker is not None)  # noqa: B010
        setattr(module, "get_kv_transfer_group", lambda: SimpleNamespace(connector_worker=worker))  # noqa: B010
        for name in ("vllm", "vllm.distributed"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)

    yield put


def test_the_extension_reads_and_shortens_leases(connector: Callable[[Any], None]) -> None:
    now_s = time.perf_counter()
    worker = SimpleNamespace(
        block_len_per_layer=[512, 256],
        _bidirectional_kv_xfer_enabled=False,
        _is_turn2_read_expired=lambda _: False,
        _reqs_to_send={"a": now_s + 60, "b": now_s + 1, "c": now_s + 60},
    )
    connector(worker)
    assert KvLeases().forebay_block_bytes() == (768, 2, True)
    assert worker._bidirectional_kv_xfer_enabled, "vLLM looks at the end of a lease before it reads"
    assert KvLeases().forebay_release(["a", "b", "gone"], 20.0) == 2
    left = {name: round(until_s - now_s) for name, until_s in worker._reqs_to_send.items()}
    assert left == {"a": 20, "b": 1, "c": 60}


def test_extension_tolerates_other_releases(connector: Callable[[Any], None]) -> None:
    for worker in (None, SimpleNamespace()):
        connector(worker)
        assert KvLeases().forebay_block_bytes() == (0, 0, False)
        assert KvLeases().forebay_release(["a"], 20.0) == 0
