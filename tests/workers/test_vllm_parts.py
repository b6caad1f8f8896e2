"""Parts of the vLLM engine that need no vLLM: arguments, rank buffers, adapters, media, and the NIXL side channel."""

import io
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from prometheus_client import CollectorRegistry, Counter, generate_latest

from forebay.engine_model.model import Removed, Stored
from forebay.events.control import Role
from forebay.events.media import Encoded, Media
from forebay.events.requests import Sampling, StructuredOutput, TokenBias
from forebay.events.tokens import TokenLogprob, TopLogprob
from forebay.workers.engine import AttemptFailed, CacheChange, Cleared, EngineError, EngineRefused
from forebay.workers.engines import free_ports, model_engine
from forebay.workers.engines.encode import MediaUnusable
from forebay.workers.engines.loras import LoraAdapter, Loras
from forebay.workers.engines.model_engine import PrefixedMetrics, check_model
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.sglang.requests import structured_argument
from forebay.workers.engines.tensorrt_llm.requests import guided_arguments
from forebay.workers.engines.vllm.core import HOST, PORT, engine_arguments, side_channel
from forebay.workers.engines.vllm.engine import VllmEngine, VllmStepStats
from forebay.workers.engines.vllm.media import ItemMetadata, collapsed, embedded_prompt, engine_prompt, raw_prompt
from forebay.workers.engines.vllm.requests import (
    engine_priority,
    sampling_arguments,
    structured_arguments,
    token_logprobs,
)
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.runtime.rank_buffer import RankBuffer
from tests.harness import local
from tests.workers.conftest import work_item
from tests.workers.engine_setup import lora_directory
from tests.workers.pictures import png

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
def test_structured_output_becomes_parameters_of_vllm(
    kind: Any, text: str, vllm: Any, sglang: Any, tensorrt_llm: Any
) -> None:
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
        SETTINGS, role="prefill", dp_size=2, loras={"a": Path("/a")}, arguments={"block_size": 64, "dtype": "float32"}
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
    assert loras.is_reused(LoraAdapter("a", 3, "/other"))
    loras.add(LoraAdapter("b", 4, "/cache/b", "digest"))
    assert not loras.is_reused(LoraAdapter("b", 5, "/cache/b", "digest")), "its cached blocks are still valid"
    assert loras.is_reused(LoraAdapter("b", 5, "/cache/b", "other"))
    loras.loaded.pop("b")
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


def test_statistics_of_a_step_become_the_load() -> None:
    reported: list[tuple[int, int, int, float]] = []
    of_tiers: list[tuple[int, bytes]] = []
    stats = VllmStepStats(
        1, lambda *generated: reported.append(generated), lambda *generated: of_tiers.append(generated)
    )
    stats.record(None, None, engine_idx=1)
    step = SimpleNamespace(
        num_running_reqs=3, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.25, kv_connector_stats=None
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


PLACEHOLDER = 99


def media(first_token: int, tokens: int, kind: str = "image", content: bytes = b"") -> Media:
    digest = f"{first_token:064x}"
    fields = {"kind": kind, "digest": digest, "mime": "image/png", "first_token": first_token, "tokens": tokens}
    return Media(**fields, content=content)  # type: ignore[arg-type]


pieces = st.lists(st.tuples(st.lists(st.integers(0, 50), max_size=4), st.integers(1, 5)), max_size=4)


@given(pieces, st.lists(st.integers(0, 50), max_size=4))
def test_runs_of_placeholders_are_collapsed(pieces: list[tuple[list[int], int]], tail: list[int]) -> None:
    short: list[int] = []
    long: list[int] = []
    places = []
    for text, tokens in pieces:
        short += [*text, PLACEHOLDER]
        places.append(media(len(long) + len(text), tokens))
        long += [*text, *[PLACEHOLDER] * tokens]
    assert collapsed([*long, *tail], places) == [*short, *tail]


def test_embeddings_are_cut_by_item_and_kind() -> None:
    some = (media(1, 2), media(4, 3, "video"), media(8, 1))
    item = work_item("r", [5, 99, 99, 6, 98, 98, 98, 7, 99], 3, media=some)
    rows = np.arange(12.0).reshape(6, 2)
    prompt = embedded_prompt(item, rows, [ItemMetadata()] * 3)
    assert prompt["prompt_token_ids"] == [5, 99, 6, 98, 7, 99]
    assert [one.tolist() for one in prompt["multi_modal_data"]["image"]] == [[[0, 1], [2, 3]], [[10, 11]]]
    assert [one.tolist() for one in prompt["multi_modal_data"]["video"]] == [[[4, 5], [6, 7], [8, 9]]]
    assert prompt["multi_modal_uuids"] == {"image": [f"{1:064x}", f"{8:064x}"], "video": [f"{4:064x}"]}


def test_embeddings_with_further_inputs_of_the_model_are_one_array() -> None:
    some = (media(1, 2), media(4, 1))
    item = work_item("r", [5, 99, 99, 6, 99], 3, media=some)
    rows = np.arange(6.0).reshape(3, 2)
    prompt = embedded_prompt(
        item, rows, [ItemMetadata("w", {"grid": [1, 2], "s": 0.5}), ItemMetadata("w", {"grid": [3, 4], "s": 2})]
    )
    data = prompt["multi_modal_data"]["image"]
    assert data["image_embeds"].tolist() == rows.tolist()
    assert (data["grid"], data["s"], prompt["prompt_token_ids"]) == ([[1, 2], [3, 4]], [0.5, 2], [5, 99, 6, 99])


def test_images_are_decoded_and_videos_only_for_models_that_sample_frames(monkeypatch: pytest.MonkeyPatch) -> None:

    prompt = raw_prompt(work_item("r", [1, 99, 99], 2, media=(media(1, 2, content=png()),)), "llava")
    (image,) = prompt["multi_modal_data"]["image"]
    assert (image.mode, image.size, prompt["prompt_token_ids"]) == ("RGB", (16, 16), [1, 99])
    with pytest.raises(MediaUnusable, match="cannot decode an image"):
        raw_prompt(work_item("r", [1, 99], 2, media=(media(1, 1, content=b"no"),)), "llava")
    clip = work_item("r", [1, 99, 99], 2, media=(media(1, 2, "video", content=b"frames"),))
    text = "decode videos for qwen2_vl, qwen2_5_vl, not for qwen3_vl; use images, or an encoder of your own"
    with pytest.raises(MediaUnusable, match=text):
        raw_prompt(clip, "qwen3_vl")

    def sampled_video(content: bytes) -> tuple[bytes, dict[str, int]]:
        if not content:
            raise ZeroDivisionError("no frames")
        return content, {"fps": 24}

    monkeypatch.setitem(sys.modules, "forebay.workers.engines.vllm.calls", SimpleNamespace(sampled_video=sampled_video))
    assert raw_prompt(clip, "qwen2_vl")["multi_modal_data"] == {"video": [(b"frames", {"fps": 24})]}
    with pytest.raises(MediaUnusable, match="cannot decode a video: no frames"):
        raw_prompt(work_item("r", [1, 99], 2, media=(media(1, 1, "video", content=b""),)), "qwen2_vl")


def test_photos_are_upright_and_transparent_pixels_are_white() -> None:
    """As in vLLM's own server and in Hugging Face's processors."""
    image = Image
    turned = image.Exif()
    turned[0x0112] = 6

    def pixels(mode: str, kind: str, color: Any, **fields: Any) -> Any:
        content = io.BytesIO()
        image.new(mode, (16, 8), color).save(content, kind, **fields)
        (found,) = raw_prompt(work_item("r", [99], 1, media=(media(0, 1, content=content.getvalue()),)), "")[
            "multi_modal_data"
        ]["image"]
        assert found.mode == "RGB"
        return found.size, found.getpixel((0, 0))

    assert pixels("RGB", "PNG", "red", exif=turned) == ((8, 16), (255, 0, 0))
    assert pixels("RGB", "JPEG", "black", exif=turned) == ((8, 16), (0, 0, 0))
    assert pixels("RGB", "MPO", "black", exif=turned) == ((8, 16), (0, 0, 0))
    assert pixels("RGB", "PNG", "red", exif=b"Exif\0\0broken") == ((16, 8), (255, 0, 0))
    assert pixels("RGBA", "PNG", (9, 9, 9, 0)) == ((16, 8), (255, 255, 255))
    assert pixels("LA", "PNG", (9, 0)) == ((16, 8), (255, 255, 255))
    assert pixels("P", "PNG", 0, transparency=0) == ((16, 8), (255, 255, 255))
    assert pixels("CMYK", "JPEG", (0, 0, 0, 0)) == ((16, 8), (255, 255, 255))


class Rendering:
    """Stand-in for the prompt rendering of `AsyncLLM`, with `spans` tokens per placeholder."""

    def __init__(self, *, multimodal: bool = True, spans: int = 2, layers: int = 0) -> None:
        vision = SimpleNamespace(deepstack_visual_indexes=[5] * layers)
        config = SimpleNamespace(
            supports_multimodal_inputs=multimodal,
            get_inputs_embeds_size=lambda: 4,
            hf_config=SimpleNamespace(vision_config=vision),
        )
        self.vllm_config = SimpleNamespace(model_config=config)
        self.renderer = self
        self.requested: list[dict[str, Any]] = []
        self._spans = spans

    async def render_cmpl_async(self, prompts: list[dict[str, Any]], *, skip_mm_cache: bool) -> list[dict[str, Any]]:
        assert skip_mm_cache
        self.requested += prompts
        (prompt,) = prompts
        tokens: list[int] = []
        for one in prompt["prompt_token_ids"]:
            tokens += [one] * (self._spans if one == PLACEHOLDER else 1)
        return [{"type": "multimodal", "prompt_token_ids": tokens, "cache_salt": prompt.get("cache_salt")}]


def own_weights() -> str:
    return "a" * 64


async def test_expanded_prompt_must_equal_that_of_the_ingress() -> None:

    item = work_item("r", [1, 99, 99, 2], 2, media=(media(1, 2, content=png()),), cache_namespace="tenant")
    llm = Rendering()
    prompt = await engine_prompt(llm, item, None, own_weights)
    assert (prompt["prompt_token_ids"], prompt["cache_salt"]) == ([1, 99, 99, 2], "tenant")
    assert llm.requested[0]["prompt_token_ids"] == [1, 99, 2]
    with pytest.raises(AttemptFailed, match="expands the prompt to 3 tokens") as caught:
        await engine_prompt(Rendering(spans=1), item, None, own_weights)
    assert caught.value.error.status == 501
    text = await engine_prompt(Rendering(multimodal=False), work_item("r", [1, 2], 2), None, own_weights)
    assert text == {"type": "token", "prompt_token_ids": [1, 2]}


async def test_unsupported_media_are_refused() -> None:
    item = work_item("r", [1, 99, 99], 2, media=(media(1, 2, content=b"no"),))
    refusals = {
        "does not support images": (Rendering(multimodal=False), None, 501, "media_not_supported"),
        r"cannot decode an image: cannot identify image file <_io\.BytesIO object at": (
            Rendering(),
            None,
            400,
            "media_not_encoded",
        ),
    }
    for text, (llm, embeddings, status, code) in refusals.items():
        with pytest.raises(AttemptFailed, match=text) as caught:
            await engine_prompt(llm, item, embeddings, own_weights)
        assert (caught.value.error.status, caught.value.error.code) == (status, code)
        assert not llm.requested


OTHER_MODEL = (
    r"other weights \(bbbbbbbbbbbbbbbb\) than this worker \(aaaaaaaaaaaaaaaa\): start both with the same files"
)


@pytest.mark.parametrize(
    ("metadata", "width", "text"),
    [
        (b"", 3, "have width 3, the model's have 4"),
        (b'[{"weights":"' + b"b" * 64 + b'"}]', 4, OTHER_MODEL),
        (b"[{},{}]", 4, "got metadata for 2 images and videos, expected 1"),
        (b'[{"fields":{"grid":"1"}}]', 4, "the metadata of the embeddings are invalid"),
        (b"not JSON", 4, "the metadata of the embeddings are invalid"),
    ],
)
async def test_embeddings_of_another_model_are_computed_again(metadata: bytes, width: int, text: str) -> None:
    encoded = Encoded(descriptor=b"", shape=(2, width), dtype="float32", checksum="0" * 16, metadata=metadata)
    item, llm = work_item("r", [1, 99, 99], 2, media=(media(1, 2),), encoded=encoded), Rendering()
    with pytest.raises(TransferError, match=text):
        await engine_prompt(llm, item, np.zeros((2, width)), own_weights)
    assert not llm.requested


async def test_width_of_embeddings_of_several_layers() -> None:
    item = work_item("r", [1, 99, 99], 2, media=(media(1, 2),))
    with pytest.raises(TransferError, match="have width 4, the model's have 12"):
        await engine_prompt(Rendering(layers=2), item, np.zeros((2, 4)), own_weights)


def reported(role: Role, **options: Any) -> EngineSettings:
    return EngineSettings(model=Path("/m"), model_name="m", role=role, **options)


@pytest.fixture
def no_channel(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (HOST, PORT, "VLLM_HOST_IP"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.usefixtures("no_channel")
def test_engines_of_a_machine_get_different_ports() -> None:
    """Although none of them listens yet. The environment of this process stays as it is."""
    before = dict(os.environ)
    roles: list[Role] = ["prefill", "decode"] * 4
    with ThreadPoolExecutor(len(roles)) as threads:
        channels = list(threads.map(lambda role: side_channel(reported(role, dp_size=2)), roles))
    ports = [int(channel[PORT]) + rank for channel in channels for rank in range(2)]
    assert len(set(ports)) == len(ports)
    assert {channel[HOST] for channel in channels} == {"127.0.0.1"}
    assert dict(os.environ) == before
    assert side_channel(reported("aggregated")) == {}
    script = (
        "from forebay.workers.engines.free_ports import reserve_ports\n"
        f"print(any(reserve_ports([port], '127.0.0.1') for port in {ports}))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout == f"{sys.platform != 'linux'}\n"


def test_missing_free_port_is_reported(no_channel: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        no_channel.setattr(free_ports, "FIRST", port)
        no_channel.setattr(free_ports, "LAST", port + 2)
        with pytest.raises(EngineError, match=PORT):
            side_channel(reported("decode"))


def test_a_configured_port_serves_one_engine(no_channel: pytest.MonkeyPatch) -> None:
    port = local.free_ports(1)
    no_channel.setenv(PORT, str(port))
    assert side_channel(reported("prefill")) == {HOST: "127.0.0.1", PORT: str(port)}
    with pytest.raises(EngineError, match=f"cannot listen at 127.0.0.1:{port}: {PORT} must be the first of 1 free"):
        side_channel(reported("decode"))


@pytest.mark.parametrize("value", ["70000", "-1", "x", "65535"])
def test_an_invalid_port_is_reported(value: str, no_channel: pytest.MonkeyPatch) -> None:
    no_channel.setenv(PORT, value)
    with pytest.raises(EngineError, match=f"cannot listen at 127.0.0.1:{value}"):
        side_channel(reported("prefill", dp_size=2))


def test_configured_side_channel_is_used(no_channel: pytest.MonkeyPatch) -> None:
    no_channel.setenv("VLLM_HOST_IP", "127.0.0.2")
    assert side_channel(reported("prefill"))[HOST] == "127.0.0.2"
    no_channel.setenv(HOST, "127.0.0.3")
    assert side_channel(reported("prefill", near_host="127.0.0.5"))[HOST] == "127.0.0.3"
    given = side_channel(reported("prefill", near_host="127.0.0.5", kv_host="127.0.0.4"))
    assert given[HOST] == "127.0.0.4", "the command line overrides the environment"


@pytest.mark.usefixtures("no_channel")
def test_side_channel_listens_at_the_reachable_address() -> None:
    channel = side_channel(reported("decode", near_host="127.0.0.5"))
    assert channel[HOST] == "127.0.0.5"
    socket.create_server(("127.0.0.5", int(channel[PORT]))).close()
