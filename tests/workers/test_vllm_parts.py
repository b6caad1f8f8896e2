"""Parts of the vLLM engine that need no vLLM: arguments, rank buffers and adapters."""

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest

from forebay.engine_model.model import EngineLoad, Finished, FirstTokenStep, Removed, Stored
from forebay.events.requests import Sampling, StructuredOutput, TokenBias
from forebay.events.tokens import ResponseError, TokenLogprob, TopLogprob
from forebay.workers.engine import CacheChange, Cleared, EngineError, EngineRefused, Failed
from forebay.workers.engines import model_engine
from forebay.workers.engines.loras import Loras
from forebay.workers.engines.model_engine import PrefixedMetrics, check_model
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.sglang.requests import structured_argument
from forebay.workers.engines.tensorrt_llm.requests import guided_arguments
from forebay.workers.engines.vllm.core import engine_arguments
from forebay.workers.engines.vllm.engine import VllmEngine, VllmStepStats
from forebay.workers.engines.vllm.requests import (
    engine_priority,
    prompt_of,
    sampling_arguments,
    structured_arguments,
    token_logprobs,
)
from forebay.workers.runtime.rank_buffer import RankBuffer
from tests.workers.engine_setup import lora_directory
from tests.workers.work_items import item

SETTINGS = EngineSettings(model=Path("/models/tiny"), model_name="tiny", block_size=32, kv_blocks=23)


def test_sampling_arguments_have_the_names_of_vllm() -> None:
    sampling = Sampling(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias=(TokenBias(token_id=4, bias=-1.5),),
        logprobs=2,
        structured=StructuredOutput(kind="json_object"),
        ignore_eos=True,
        top_k=7,
        min_p=0.05,
        repetition_penalty=1.1,
        min_tokens=2,
        stop_token_ids=(1, 2),
    )
    generated = sampling_arguments(sampling)
    fields = {name: getattr(sampling, name) for name in Sampling.__struct_fields__}
    del fields["structured"]
    fields |= {"logit_bias": {4: -1.5}, "stop_token_ids": [1, 2], "detokenize": False}
    assert generated == fields


@pytest.mark.parametrize(
    ("kind", "text", "vllm", "sglang", "tensorrt_llm"),
    [
        ("json_object", "", ("json_object", True), ("json_schema", '{"type": "object"}'), ("json_object", True)),
        ("json_schema", '{"a": 1}', ("json", '{"a": 1}'), ("json_schema", '{"a": 1}'), ("json", '{"a": 1}')),
        ("regex", "a+", ("regex", "a+"), ("regex", "a+"), ("regex", "a+")),
        ("grammar", "root ::= x", ("grammar", "root ::= x"), ("ebnf", "root ::= x"), ("grammar", "root ::= x")),
        ("choice", '["a.b", "c"]', ("choice", ["a.b", "c"]), ("regex", r"(a\.b|c)"), ("regex", r"(a\.b|c)")),
    ],
)
def test_structured_outputs(kind: Any, text: str, vllm: Any, sglang: Any, tensorrt_llm: Any) -> None:
    structured = StructuredOutput(kind=kind, text=text)
    assert structured_arguments(structured) == dict([vllm])
    assert structured_argument(structured) == sglang
    assert guided_arguments(structured) == dict([tensorrt_llm])


@pytest.mark.parametrize("text", ["", "{}", "[1]", '"a"'])
@pytest.mark.parametrize("convert", [structured_arguments, structured_argument, guided_arguments])
def test_invalid_choices_are_rejected(convert: Callable[[StructuredOutput], Any], text: str) -> None:
    with pytest.raises(ValueError, match="choices must be a JSON list of strings"):
        convert(StructuredOutput(kind="choice", text=text))


def test_priority_is_negated_for_vllm() -> None:
    items = [5, 0, -3]  # ours: the first is soonest
    assert sorted(items, key=lambda one: engine_priority(one, "priority")) == items
    assert {engine_priority(one, "fcfs") for one in items} == {0}


def test_a_cache_namespace_is_a_salt() -> None:
    assert prompt_of([1, 2]) == {"type": "token", "prompt_token_ids": [1, 2]}
    assert prompt_of([1], "tenant")["cache_salt"] == "tenant"


@dataclass
class LoggedLogprob:
    logprob: float
    rank: int | None


def test_logprobs_are_sorted_by_rank() -> None:
    place = {5: LoggedLogprob(-3.0, 9), 7: LoggedLogprob(-1.0, 2), 6: LoggedLogprob(-0.5, 1)}
    reported = token_logprobs([5], [place], 2)
    top = (TopLogprob(token_id=6, logprob=-0.5), TopLogprob(token_id=7, logprob=-1.0))
    assert reported == (TokenLogprob(logprob=-3.0, top=top),)
    assert token_logprobs([5], [place], 0) == (TokenLogprob(logprob=-3.0),)
    assert token_logprobs([5], [{5: LoggedLogprob(float("-inf"), 1)}], 1)[0].top[0].logprob == -9999.0


def test_engine_arguments_override_settings() -> None:
    plain = engine_arguments(SETTINGS, kv_events=True, sockets=Path("/private"))
    assert (plain["model"], plain["served_model_name"], plain["block_size"]) == ("/models/tiny", "tiny", 32)
    assert plain["num_gpu_blocks_override"] == 24, "vLLM reserves one"
    assert plain["kv_events_config"]["endpoint"] == "ipc:///private/events"
    assert plain["kv_events_config"]["replay_endpoint"] == "ipc:///private/replay"
    assert not {"max_num_seqs", "data_parallel_size", "enable_lora", "kv_transfer_config"} & plain.keys()
    own = replace(
        SETTINGS,
        role="prefill",
        dp_size=2,
        loras={"a": Path("/a")},
        arguments={"block_size": 64, "dtype": "float32"},
    )
    generated = engine_arguments(own, kv_events=True, sockets=Path("/private"))
    assert (generated["block_size"], generated["dtype"]) == (64, "float32")
    assert (generated["data_parallel_size"], generated["enable_lora"]) == (2, True)
    assert generated["kv_transfer_config"] == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": 60},
    }
    assert generated["worker_extension_cls"] == "forebay.workers.engines.vllm.extension.KvLeases"
    events = generated["kv_events_config"]
    assert {events["endpoint"], events["replay_endpoint"]} == {"tcp://*:0"}
    assert "kv_events_config" not in engine_arguments(own, kv_events=False, sockets=Path("/private"))


def test_model_directory_is_checked(tmp_path: Path) -> None:
    def refusal(**arguments: Any) -> str:
        with pytest.raises(EngineError) as caught:
            check_model(EngineSettings(model=tmp_path / "m", model_name="m", arguments=arguments))
        return str(caught.value)

    assert "no such model directory" in refusal()
    (tmp_path / "m").mkdir()
    assert "no config.json" in refusal()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert "no weights" in refusal()
    check_model(EngineSettings(model=tmp_path / "m", model_name="m", arguments={"load_format": "dummy"}))


FIRST, SECOND, THIRD = (item(f"r{number}", range(3), attempt=2) for number in (1, 2, 3))


def test_rank_buffer_returns_every_event_once() -> None:
    rank = RankBuffer(3, 10)
    first = rank.take()
    assert first is not None
    assert (first.rank, first.load) == (3, EngineLoad(0, 0, 0, 10))
    assert rank.take() is None
    stored = Stored(None, (1, 2))
    error = ResponseError(status=500, code="engine_error", message="no")
    rank.changed([stored])
    rank.began(FIRST, 32)
    rank.add_tokens(FIRST, 4, [7])
    rank.add_tokens(FIRST, 5, [8, 9], (TokenLogprob(logprob=-1.0),))
    rank.add_tokens(SECOND, 0, [1])
    rank.finished(Finished("r1", 2, "stop", 3, 7, 32))
    rank.failed(SECOND, error)
    rank.embedded(THIRD, b"\0\0\x80?")
    rank.report(1, 2, 0.5)
    batch = rank.take()
    assert batch is not None
    assert batch.cache_changes == [stored]
    assert [(one.request_id, one.attempt, one.first_index, one.token_ids) for one in batch.emitted] == [
        ("r1", 2, 4, struct.pack("<3I", 7, 8, 9)),
        ("r2", 2, 0, struct.pack("<I", 1)),
    ]
    assert batch.emitted[0].logprobs == (TokenLogprob(logprob=-1.0),)
    assert batch.first_tokens == [FirstTokenStep("r1", 2, 32)]
    assert batch.finished == [Finished("r1", 2, "stop", 3, 7, 32)]
    assert batch.failed == [Failed("r2", 2, error)]
    assert batch.vectors[0].packed == b"\0\0\x80?"
    assert batch.load == EngineLoad(1, 2, 5, 10)
    assert rank.take() is None


def test_clear_is_reported_at_once_and_changes_resume_after_the_engine_confirms_it() -> None:
    rank = RankBuffer(0, 10)
    rank.changed([Stored(None, (1,))])
    before = rank.clears
    rank.cleared(before)
    assert rank.muted
    rank.changed([Stored(None, (2,)), Removed((1,))])  # of before
    rank.changed([Cleared(), Stored(None, (3,))])
    batch = rank.take()
    assert batch is not None
    assert batch.cache_changes == [Stored(None, (1,)), Cleared(), Stored(None, (3,))]
    # If the engine was first, there is nothing to add.
    before = rank.clears
    rank.changed([Cleared(), Stored(None, (4,))])
    rank.cleared(before)
    assert not rank.muted
    batch = rank.take()
    assert batch is not None
    assert batch.cache_changes == [Cleared(), Stored(None, (4,))]


def test_reset_drops_unpublished_events() -> None:
    rank = RankBuffer(0, 10)
    rank.report(4, 0, 0.4)
    rank.add_tokens(FIRST, 0, [7])
    rank.changed([Stored(None, (1,))])
    rank.reset()
    rank.changed([Stored(None, (2,))])
    batch = rank.take()
    assert batch is not None
    assert (batch.emitted, batch.cache_changes, batch.load) == ([], (), EngineLoad(0, 0, 0, 10))
    rank.changed([Cleared(), Stored(None, (3,))])
    batch = rank.take()
    assert batch is not None
    assert batch.cache_changes == [Stored(None, (3,))]


EVENTS = st.one_of(
    st.integers(0, 9).map(lambda block: ("stored", block)),
    st.integers(0, 9).map(lambda block: ("removed", block)),
    st.sampled_from([("clear", 0), ("reset", 0), ("take", 0)]),
    st.integers(1, 5).map(lambda events: ("observe", events)),
)


@given(st.lists(EVENTS, max_size=60))
def test_index_never_holds_removed_blocks(history: list[tuple[str, int]]) -> None:
    """The engine's events come late; whatever was ordered meanwhile, in the end both hold the same."""
    rank, truth, index = RankBuffer(0, 10), set[int](), set[int]()
    on_the_way: list[CacheChange] = []

    def observe(count: int) -> None:
        rank.changed(on_the_way[:count])
        del on_the_way[:count]

    def take() -> None:
        for change in (rank.take() or SimpleNamespace(cache_changes=())).cache_changes:
            match change:
                case Stored():
                    index.update(change.hashes)
                case Removed():
                    index.difference_update(change.hashes)
                case _:
                    index.clear()

    for what, number in itertools.chain(history, [("clear", 0), ("take", 0)]):
        match what:
            case "stored" if number not in truth:
                truth.add(number)
                on_the_way.append(Stored(None, (number,)))
            case "removed" if number in truth:
                truth.remove(number)
                on_the_way.append(Removed((number,)))
            case "clear" | "reset":
                if what == "reset":
                    rank.reset()
                    index.clear()  # the owner's
                before = rank.clears
                truth.clear()
                on_the_way.append(Cleared())
                rank.cleared(before)
            case "take":
                take()
            case "observe":
                observe(number)
    assert not index
    observe(len(on_the_way))
    take()
    assert index == truth


def test_an_adapter_that_the_engine_does_not_unload_stays(tmp_path: Path) -> None:
    loras, directory = Loras(), lora_directory(tmp_path / "a")
    adapter = loras.offered("a", str(directory))
    assert adapter is not None
    loras.add(adapter)
    with pytest.raises(EngineRefused, match="busy"), loras.removing("a") as going:
        assert going == adapter
        assert not loras.loaded, "no new request gets what goes"
        raise EngineRefused("busy")
    assert loras.loaded == {"a": adapter}, "refused, nothing changed"
    with loras.removing("a"):
        pass
    assert loras.is_reused("a")
    again = loras.offered("a", str(directory))
    assert again is not None and again.number > adapter.number


def test_other_metrics_are_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = CollectorRegistry()
    for name in ("vllm:steps", "lmcache:hits", "python_gc", "forebay_things"):
        Counter(name, "of a test", registry=theirs).inc()
    monkeypatch.setattr(model_engine, "REGISTRY", theirs)
    ours = CollectorRegistry()
    ours.register(PrefixedMetrics(*VllmEngine.METRICS))
    lines = generate_latest(ours).decode().splitlines()
    assert {line.split("_total")[0] for line in lines if "_total " in line and line[0] != "#"} == {
        "vllm:steps",
        "lmcache:hits",
    }


def test_step_statistics() -> None:
    reported: list[tuple[int, int, int, float]] = []
    of_tiers: list[tuple[int, bytes]] = []
    stats = VllmStepStats(
        1, lambda *generated: reported.append(generated), lambda *generated: of_tiers.append(generated)
    )
    stats.record(None, None, engine_idx=1)
    step = SimpleNamespace(
        num_running_reqs=3,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.25,
        kv_connector_stats=None,
    )
    stats.record(step, None)
    assert reported == [(1, 3, 3, 0.25)]
    several: list[dict[str, Any]] = [
        {"report": b"a"},
        {"ForebayTiers": {"report": b"b"}, "NixlConnector": {}},
        {"NixlConnector": {}},
    ]
    for connectors in several:
        step.kv_connector_stats = connectors
        stats.record(step, None)
    assert of_tiers == [(1, b"a"), (1, b"b")]
