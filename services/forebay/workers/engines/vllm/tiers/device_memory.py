"""The KV cache of a vLLM worker as one payload of bytes per block. Imports torch, a dependency of vLLM.

vLLM has one tensor per layer, with the blocks of the cache in its first dimension, or a separate half for keys and for
values. A payload consists of the bytes of a block in each of these tensors, in the order of the layers.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

KEYS_AND_VALUES = 2


class DeviceMemory:
    """Copies blocks out of the KV cache and into it. Thread-safe for different blocks.

    `layout`, for `KvIdentity.layout`, does not depend on the number of blocks. Raises ValueError if a tensor has
    another layout, or is not in the memory of the CPU.
    """

    def __init__(self, layers: Mapping[str, torch.Tensor], blocks: int) -> None:
        self._rows: list[torch.Tensor] = []  # per tensor: bytes of each block
        shapes: list[str] = []
        seen: set[int] = set()
        for name, tensor in layers.items():
            if tensor.device.type != "cpu":
                raise ValueError(f"forebay's KV tiers need a CPU, got {tensor.device.type}: use OffloadingConnector")
            if tensor.data_ptr() not in seen:  # layers may share their KV
                seen.add(tensor.data_ptr())
                rows, shape = block_rows(name, tensor, blocks)
                self._rows += rows
                shapes.append(shape)
        sizes = [rows.shape[1] for rows in self._rows]
        self.block_bytes = sum(sizes)
        self.layout = ",".join(shapes)
        self._parts = [slice(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(len(sizes))]

    def gather(self, block: int) -> memoryview:
        payload = torch.empty(self.block_bytes, dtype=torch.uint8)
        for rows, part in self._layers():
            payload[part].copy_(rows[block])
        return memoryview(payload.numpy())

    def scatter(self, block: int, payload: memoryview) -> None:
        """Write a payload into a block. When this method returns, the engine may read the block."""
        source = torch.frombuffer(payload, dtype=torch.uint8)
        for rows, part in self._layers():
            rows[block].copy_(source[part])

    def _layers(self) -> Iterator[tuple[torch.Tensor, slice]]:
        return zip(self._rows, self._parts, strict=True)


def block_rows(name: str, tensor: torch.Tensor, blocks: int) -> tuple[Sequence[torch.Tensor], str]:
    """Return views of a tensor of the KV cache as bytes, each of shape [blocks, bytes per block], and their layout.

    The layout consists of the sizes of the dimensions in memory order, per block, and the order of the dimensions.
    Raises ValueError if the bytes of a block are not contiguous within the tensor, or within its keys and its values.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    stored = tensor.permute(order)
    if stored.is_contiguous():
        # The kernels of the engine may use smaller blocks than its scheduler.
        sizes = list(stored.shape)
        if sizes[0] % blocks == 0:
            return [stored.view(torch.uint8).view(blocks, -1)], _layout([sizes[0] // blocks, *sizes[1:]], order)
        if sizes[0] == KEYS_AND_VALUES and sizes[1] % blocks == 0:
            rows = [half.view(torch.uint8).view(blocks, -1) for half in stored]
            return rows, _layout([sizes[0], sizes[1] // blocks, *sizes[2:]], order)
    raise ValueError(
        f"KV tiers cannot copy single blocks of layer {name}: shape {tuple(tensor.shape)}, strides {tensor.stride()},"
        f" {blocks} blocks"
    )


def _layout(sizes: Sequence[int], order: Sequence[int]) -> str:
    return f"{'x'.join(map(str, sizes))}@{''.join(map(str, order))}"
