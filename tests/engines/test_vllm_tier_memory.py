"""Copies of single blocks of vLLM's KV cache, and the models whose blocks cannot be copied."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # as in test_vllm_engine

BLOCKS = 6


def layouts() -> dict[str, Any]:
    """Return KV caches of one layer in the layouts of vLLM's kernels."""
    import torch  # noqa: PLC0415 - only in .venv-engines

    def numbers(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.randn(*shape).to(dtype)

    return {
        "blocks first": numbers(BLOCKS, 2, 4, 8),
        "heads first within a block": numbers(BLOCKS, 4, 2, 8).permute(0, 2, 1, 3),
        "keys and values apart": numbers(2, BLOCKS, 4, 2, 8),
        "smaller blocks in the kernel": numbers(BLOCKS * 2, 2, 4, 8),
        "bfloat16": numbers(BLOCKS, 2, 4, 8, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("name", ["blocks first", "heads first within a block", "keys and values apart", "bfloat16"])
def test_block_is_copied_with_every_byte_and_no_other(name: str) -> None:
    import torch  # noqa: PLC0415 - only in .venv-engines

    from forebay.workers.engines.vllm.tiers.device_memory import DeviceMemory  # noqa: PLC0415

    cache = layouts()[name]
    before = cache.clone()
    memory = DeviceMemory({"a": cache, "b": torch.zeros_like(cache), "shared": cache}, BLOCKS)
    assert memory.block_bytes == 2 * cache.numel() * cache.element_size() // BLOCKS
    saved = [bytes(memory.gather(block)) for block in range(BLOCKS)]
    assert len(set(saved)) == BLOCKS
    cache.zero_()
    for block in (4, 1):
        memory.scatter(block, memoryview(bytearray(saved[block])))
    at = 1 if name == "keys and values apart" else 0
    for block in range(BLOCKS):
        wanted = before.select(at, block) if block in (4, 1) else torch.zeros_like(before.select(at, block))
        assert torch.equal(cache.select(at, block), wanted)


def test_layout_is_part_of_the_identity() -> None:
    from forebay.workers.engines.vllm.tiers.device_memory import DeviceMemory  # noqa: PLC0415 - imports torch

    found = layouts()
    names = {name: DeviceMemory({"a": cache}, BLOCKS).layout for name, cache in found.items() if name != "bfloat16"}
    assert len(set(names.values())) == len(names), names
    fewer = found["blocks first"][:3]
    assert DeviceMemory({"a": fewer}, 3).layout == names["blocks first"], "caches of any size share a store"
    with pytest.raises(ValueError, match="cannot copy single blocks of layer a"):
        DeviceMemory({"a": found["blocks first"][:, :, ::2]}, BLOCKS)
    with pytest.raises(ValueError, match="cannot copy single blocks"):
        DeviceMemory({"a": found["blocks first"]}, BLOCKS + 1)


def test_models_without_full_attention_are_refused() -> None:
    pytest.importorskip("vllm")
    import torch  # noqa: PLC0415 - only in .venv-engines
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # noqa: PLC0415

    from forebay.workers.engines.vllm.tiers.connector import check_groups  # noqa: PLC0415

    sizes: dict[str, Any] = {"block_size": 32, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    full, window = FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=64)

    def check(*specs: Any) -> None:
        check_groups(SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]))

    check(full)
    for specs in ((window,), (full, window), ()):
        with pytest.raises(ValueError, match="all layers attend to the whole prompt"):
            check(*specs)
