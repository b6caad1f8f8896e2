"""vLLM's own offloading as KV tiers: its configuration, and workers with a stand-in for vLLM."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

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


def extra(tiers: TierSettings) -> Any:
    return offloading_connector(tiers)["kv_connector_extra_config"]


def test_vllm_offloads_everywhere_but_on_a_cpu() -> None:
    assert {device: offloads_itself(device) for device in ("cpu", "cuda", "xpu")} == {
        "cpu": False,
        "cuda": True,
        "xpu": True,
    }


def test_tiers_become_those_of_vllm() -> None:
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
    def name(store: str = "/mnt", **changes: Any) -> str:
        fields: dict[str, Any] = {"model": "/m", "dtype": "bfloat16", "cache_dtype": "auto", "block_size": 16}
        fields |= {"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | changes
        part = SimpleNamespace(**fields)
        return store_name(store, SimpleNamespace(model_config=part, cache_config=part, parallel_config=part))

    changed = [name(**{field: "other"}) for field in ("store", "model", "dtype", "cache_dtype", "tensor_parallel_size")]
    assert len({name(), *changed}) == 6 and name() == name(max_num_seqs=3)


def exported(engine: Any) -> bytes:
    ours = CollectorRegistry()
    for collector in engine.collectors():
        ours.register(collector)
    return generate_latest(ours)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, TierSettings], Any]:
    """Return a function that runs a worker on a type of device. The stand-in's `arguments` are those it got."""
    vllm_standin.install(monkeypatch, tmp_path / "sockets")
    start_standin = VllmCore.start

    async def start(core: VllmCore, arguments: dict[str, Any], *others: Any) -> Any:
        llm = await start_standin(core, arguments, *others)
        llm.arguments = arguments
        config = llm.vllm_config
        config.model_config.model, config.model_config.dtype = arguments["model"], "float32"
        config.cache_config.cache_dtype = "auto"
        config.parallel_config = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
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
        assert (await one.ask(range(40), 4)).tokens
        await engine.command(Command(action="clear_kv_blocks"))
        assert b"kvbm_" not in exported(engine)


async def test_a_worker_on_a_cpu_uses_forebays_connector(started: Callable[[str, TierSettings], Any]) -> None:
    async with started("cpu", HOST) as one:
        assert one.engine.llm.arguments["kv_transfer_config"]["kv_connector"] == "ForebayTiers"
        assert b"kvbm_" in exported(one.engine)


async def test_a_worker_on_a_gpu_does_not_start_with_a_tier_that_vllm_lacks(
    started: Callable[[str, TierSettings], Any],
) -> None:
    with pytest.raises(EngineError, match="--kv-tier host:size is missing"):
        async with started("cuda", TierSettings(store="/mnt")):
            pass
