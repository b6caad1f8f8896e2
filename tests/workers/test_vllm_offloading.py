"""vLLM's own offloading as KV tiers: its configuration, and workers with a stand-in for vLLM."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from forebay.events.control import Command
from forebay.workers.engine import EngineError
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm import engine as vllm_engine
from forebay.workers.engines.vllm.core import VllmCore, engine_arguments
from forebay.workers.engines.vllm.engine import VllmEngine
from forebay.workers.engines.vllm.offloading import offloading_connector, offloads_itself, store_name
from forebay.workers.kv_tiers.settings import TierSettings
from tests.engines.driven import driven
from tests.workers.engine_setup import SPEC, standin_settings
from tests.workers.standins import vllm_standin

HOST = TierSettings(host_bytes=4 * 10**9)
SHARED = replace(HOST, store="s3://bucket/kv/prod/", store_endpoint="https://s3.local:9000")


def test_vllm_offloads_everywhere_but_on_a_cpu() -> None:
    assert [offloads_itself(device) for device in ("cpu", "cuda", "xpu")] == [False, True, True]


def test_tiers_become_those_of_vllm() -> None:
    def extra(tiers: TierSettings) -> Any:
        return offloading_connector(tiers)["kv_connector_extra_config"]

    assert extra(HOST) == {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 4 * 10**9,
        "self_describing_kv_events": True,
        "secondary_tiers": [],
    }
    disk = {"type": "fs", "root_dir": "/kv", "locality": "LOCAL", "enable_kv_events": True}
    store = {"type": "fs", "root_dir": "/mnt", "locality": "REMOTE", "enable_kv_events": True}
    assert extra(replace(HOST, disk=Path("/kv"), store="/mnt", filter=False))["secondary_tiers"] == [disk, store]
    address = {"bucket": "bucket", "endpoint_override": "s3.local:9000", "scheme": "https"}
    bucket = {"type": "obj", "store_config": address, "prefix": "kv/prod", "locality": "REMOTE"}
    assert extra(SHARED)["secondary_tiers"] == [bucket | {"enable_kv_events": True}]


@pytest.mark.parametrize(
    ("tiers", "key"),
    [
        (TierSettings(disk=Path("/kv")), "host:size is missing"),
        (replace(HOST, disk=Path("/kv"), disk_bytes=10**9), "disk:size"),
        (replace(HOST, store="/mnt", store_bytes=10**9), "store:size"),
        (replace(SHARED, store_endpoint=""), "store:endpoint is missing"),
        (replace(HOST, disk=Path("/kv"), filter=True), "filter=on"),
    ],
)
def test_what_vllm_cannot_do_is_an_error_that_names_the_option(tiers: TierSettings, key: str) -> None:
    with pytest.raises(EngineError, match=f"^--kv-tier {key}: vLLM's offloading"):
        offloading_connector(tiers)


def test_a_decode_worker_fetches_a_prompt_before_it_loads_a_part_of_it() -> None:
    settings = EngineSettings(model=Path("/m"), model_name="m", role="decode", tiers=HOST)
    given = engine_arguments(settings, kv_events=True, sockets=Path("/s"), tiers=offloading_connector(HOST))
    both = given["kv_transfer_config"]["kv_connector_extra_config"]["connectors"]
    assert [one["kv_connector"] for one in both] == ["NixlConnector", "OffloadingConnector"]


def test_a_store_has_one_name_for_engines_that_read_each_others_blocks() -> None:
    fields = ["model", "dtype", "cache_dtype", "block_size", "tensor_parallel_size", "pipeline_parallel_size"]

    def name(changed: str, store: str = "/mnt") -> str:
        part = SimpleNamespace(**dict.fromkeys(fields, "same") | {changed: "other"})
        return store_name(store, SimpleNamespace(model_config=part, cache_config=part, parallel_config=part))

    assert len({name("max_num_seqs"), name("seed"), name("seed", "/other"), *map(name, fields)}) == 2 + len(fields)


def exported(engine: Any) -> set[str]:
    return {metric.name for collector in engine.collectors() for metric in collector.collect()}


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, TierSettings], Any]:
    """Return a function that runs a worker on a type of device. The stand-in's `arguments` are those it got."""
    vllm_standin.install(monkeypatch, tmp_path / "sockets")
    start_standin = VllmCore.start

    async def start(core: VllmCore, arguments: dict[str, Any], *others: Any) -> Any:
        llm = await start_standin(core, arguments, *others)
        llm.arguments = arguments
        llm.vllm_config.model_config.model, llm.vllm_config.model_config.dtype = arguments["model"], "float32"
        llm.vllm_config.cache_config.cache_dtype = "auto"
        llm.vllm_config.parallel_config = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
        return llm

    monkeypatch.setattr(VllmCore, "start", start)

    def run(device: str, tiers: TierSettings) -> Any:
        monkeypatch.setattr(vllm_engine, "device_type", lambda: device)
        settings = replace(standin_settings(tmp_path), tiers=tiers, max_num_seqs=8, max_num_batched_tokens=64)
        return driven(VllmEngine(settings), msgspec.structs.replace(SPEC, block_size=settings.block_size))

    return run


async def test_a_worker_on_a_gpu_uses_vllms_offloading(started: Callable[[str, TierSettings], Any]) -> None:
    async with started("cuda", SHARED) as one:
        engine = one.engine
        assert engine.llm.arguments["kv_transfer_config"]["kv_connector"] == "OffloadingConnector"
        assert one.spec.kv_store == store_name(SHARED.store, engine.llm.vllm_config)
        await engine.command(Command(action="clear_kv_blocks"))
        assert "kvbm_matched_tokens" not in exported(engine)


async def test_a_worker_on_a_cpu_uses_forebays_connector(started: Callable[[str, TierSettings], Any]) -> None:
    async with started("cpu", HOST) as one:
        assert one.engine.llm.arguments["kv_transfer_config"]["kv_connector"] == "ForebayTiers"
        assert "kvbm_matched_tokens" in exported(one.engine)
