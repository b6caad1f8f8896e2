"""Parts of the tiers of vLLM that need no vLLM: names of blocks, configuration, digests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.core.block_hashes import hash_seed, mm_hash, sequence_hashes
from forebay.events.base import pack_u32, unpack_u64
from forebay.events.metrics import TierCost, TierCosts
from forebay.events.progress import OnboardedTokens
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm.core import engine_arguments
from forebay.workers.engines.vllm.tiers.configuration import TierConfig, children, unsupported
from forebay.workers.engines.vllm.tiers.rank import PromptNames, TierReport
from forebay.workers.kv_tiers.identity import KeyChain, KvIdentity, media_by_block
from forebay.workers.kv_tiers.metrics import TierCounters
from forebay.workers.kv_tiers.settings import TierSettings

BLOCK = 4
IDENTITY = KvIdentity(weights="ab", tp_rank=0, tp_size=1, layout="l", dtype="float32", block_size=BLOCK, block_bytes=64)
TOKENS = list(range(100, 123))
TIERS = TierSettings(host_bytes=1 << 20, disk=Path("/disk"), store="s3://bucket/kv", filter=False)


def feature(identifier: str, offset: int, length: int) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def names(tokens: list[int], **options: Any) -> list[tuple[bytes, int]]:
    return [(one.key, one.sequence_hash) for one in PromptNames(IDENTITY, **options).extend(tokens)]


@pytest.mark.parametrize("step", [1, 3, 5, 23])
def test_names_do_not_depend_on_how_tokens_arrive(step: int) -> None:
    features = [feature("00ff" * 16, 2, 7), feature("clip", 17, 2)]
    grown = PromptNames(IDENTITY, salt="t", lora_name="l", adapter="d", features=features)
    for end in range(step, len(TOKENS) + step, step):
        grown.extend(TOKENS[:end])
    packed = pack_u32(TOKENS)
    media = media_by_block(
        [(one.identifier, one.mm_position.offset, one.mm_position.length) for one in features], BLOCK
    )
    keys = KeyChain(IDENTITY, salt="t", adapter="d").extend(None, packed, media)
    objects = {0: [mm_hash("00ff" * 16)], 1: [mm_hash("00ff" * 16)], 2: [mm_hash("00ff" * 16)], 4: [mm_hash("clip")]}
    hashes = unpack_u64(sequence_hashes(packed, BLOCK, hash_seed("l", "t"), objects))
    assert [one.key for one in grown.names] == keys
    assert [one.sequence_hash for one in grown.names] == list(hashes)


def test_names_depend_on_everything_that_changes_the_kv() -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"salt": "a"},
        {"adapter": "b"},
        {"features": [feature("c", 0, 2)]},
        {"features": [feature("c", 1, 2)]},
    ]
    keys = {names(TOKENS, **variant)[0][0] for variant in variants}
    assert len(keys) == len(variants)
    renamed = names(TOKENS, lora_name="other", adapter="b")
    assert renamed[0][0] == names(TOKENS, adapter="b")[0][0], "the content of an adapter counts, not its name"


def test_configuration_survives_its_encoding() -> None:
    config = TierConfig(TIERS, "weights", 2, "w1", Path("/errors"))
    assert TierConfig.decode(config.encode()) == config
    with pytest.raises(ValueError, match="host_bytes"):
        TierConfig.decode({"tiers": {"host_bytes": "much"}})


def test_tiers_and_transfers_are_combined() -> None:
    def transfer(role: Any) -> Any:
        settings = EngineSettings(model=Path("/m"), model_name="m", role=role, tiers=TIERS)
        arguments = engine_arguments(settings, kv_events=True, sockets=Path("/s"), tiers=TierConfig(TIERS, "w"))
        return arguments["kv_transfer_config"]

    alone = transfer("aggregated")
    assert (alone["kv_connector"], alone["kv_load_failure_policy"]) == ("ForebayTiers", "recompute")
    assert TierConfig.decode(alone["kv_connector_extra_config"]) == TierConfig(TIERS, "w")
    for role, policy in (("prefill", "recompute"), ("decode", "fail")):
        both = transfer(role)
        assert (both["kv_connector"], both["kv_load_failure_policy"]) == ("MultiConnector", policy)
        tiers, _nixl = both["kv_connector_extra_config"]["connectors"]
        assert tiers["kv_load_failure_policy"] == policy
        assert [name for name, _ in children(SimpleNamespace(**both))] == ["ForebayTiers", "NixlConnector"]
    assert children(None) == []


def test_unsupported_engines_are_refused_with_the_reason() -> None:
    def reason(connector: str = "ForebayTiers", **parallel: Any) -> str:
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector=connector, kv_connector_extra_config={}),
            parallel_config=SimpleNamespace(
                **{
                    "world_size": 1,
                    "tensor_parallel_size": 1,
                    "pipeline_parallel_size": 1,
                    "distributed_executor_backend": "uni",
                }
                | parallel
            ),
            model_config=SimpleNamespace(is_encoder_decoder=parallel.get("is_encoder_decoder", False)),
        )
        return unsupported(config)

    assert reason() == ""
    assert reason("NixlConnector", world_size=4) == ""
    assert "got 2 and 1" in reason(world_size=2, tensor_parallel_size=2)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING=0" in reason(distributed_executor_backend="mp")
    assert "encoder-decoder" in reason(is_encoder_decoder=True)


def test_report_survives_its_encoding() -> None:
    counters = TierCounters(matched_tokens=3, resident_blocks={"disk": 2})
    counters.offloaded_blocks["device", "host"] += 4
    counters.misses["disk", "corrupt"] += 1
    costs = TierCosts(prefill_block_us=5.0, tiers=(TierCost(tier="disk", fixed_us=1.0, block_us=2.0),))
    report = TierReport({"r1": (OnboardedTokens(tier="disk", tokens=64, us=9),)}, costs, counters)
    assert TierReport.decode(report.encode()) == report
