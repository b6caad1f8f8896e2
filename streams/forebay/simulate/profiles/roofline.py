"""Step times and KV cache size of an engine, from a model's config.json and a GPU's data sheet.

A step takes the longer of its compute time and its memory time (Williams, Waterman, Patterson: Roofline, CACM 2009),
plus fixed overheads. A weight costs two FLOPs per token (Kaplan et al. 2020, section 2.1). A (query, key) pair costs
four FLOPs per element of a head: two for the product with the key, two for the product with the value. Every step reads
all weights that its tokens use once, and the keys and values that it attends to once.
"""

from typing import Annotated, Literal

import msgspec

from forebay.engine_model.timing import RooflineTiming
from forebay.runtime.errors import ConfigError
from forebay.simulate.profiles.sheets import Gpu, Transformer

GIB = 1 << 30
ACTIVATION_BYTES = 2  # per element between layers: bf16
REDUCTIONS = 2  # per layer: after attention and after the MLP
NUMBER_BYTES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5}
Share = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
Microseconds = Annotated[float, msgspec.Meta(ge=0.0)]


class Assumptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Efficiencies and overheads of an engine that no data sheet states.

    The defaults are round numbers, not measurements. docs/simulate.md shows their effect.
    """

    compute: Share = 0.7  # share of the GPU's FLOPS on the data sheet that large matrix products reach
    memory: Share = 0.8  # share of the memory bandwidth on the data sheet that the engine reaches
    link: Share = 0.7  # share of the link bandwidth on the data sheet that an all-reduce reaches
    reduce_us: Microseconds = 8.0  # fixed microseconds per all-reduce
    overhead_us: Microseconds = 500.0  # microseconds per step outside the model: scheduling, sampling, kernel launches
    memory_share: Share = 0.9  # share of a GPU's memory that the engine uses
    reserved_gib: Annotated[float, msgspec.Meta(ge=0.0)] = 2.0  # GiB of the used memory for activations and CUDA graphs


class NumberFormats(msgspec.Struct, frozen=True, kw_only=True):
    """Number formats of the weights and the KV cache. Matrix products with int4 weights are computed in bf16."""

    weights: Literal["bf16", "fp8", "int4"]
    kv_cache: Literal["bf16", "fp8"]


def roofline(
    model: Transformer, gpu: Gpu, numbers: NumberFormats, tensor_parallel: int, assumed: Assumptions
) -> RooflineTiming:
    """Return the step timing of a model's engine on `tensor_parallel` GPUs."""
    tflops = gpu.fp8_tflops if numbers.weights == "fp8" else gpu.bf16_tflops
    if tflops is None:
        raise ConfigError("the GPU does not support fp8: its data sheet has no fp8_tflops; use bf16 weights")
    if model.heads % tensor_parallel:
        raise ConfigError(f"tensor_parallel = {tensor_parallel} does not divide {model.heads} attention heads")
    weight = NUMBER_BYTES[numbers.weights] / tensor_parallel
    compute = 2 / tensor_parallel
    experts = model.layers * model.experts
    parallel = {}
    if tensor_parallel > 1:
        # In a ring all-reduce each GPU sends 2 (n-1)/n of the data.
        sent = 2 * (tensor_parallel - 1) / tensor_parallel * model.hidden * ACTIVATION_BYTES
        reductions = REDUCTIONS * model.layers
        parallel["reduce_us"] = reductions * assumed.reduce_us
        parallel["reduce_us_token"] = reductions * sent / (gpu.link_gb_s * 1e3 * assumed.link)
    return RooflineTiming(
        flops_token=compute * model.layers * (model.layer + model.experts_active * model.expert),
        flops_sampled=compute * model.head,
        flops_pair=4 * model.layers * model.heads * model.head_dim / tensor_parallel,
        bytes_weights=weight * (model.layers * model.layer + model.head),
        bytes_experts=weight * experts * model.expert,
        experts=model.experts or 1,
        experts_active=model.experts_active or 1,
        bytes_kv_token=kv_bytes_token(model, numbers, tensor_parallel),
        flops_us=tflops * 1e6 * assumed.compute,
        bytes_us=gpu.memory_tb_s * 1e6 * assumed.memory,
        overhead_us=assumed.overhead_us,
        **parallel,
    )


def kv_bytes_token(model: Transformer, numbers: NumberFormats, tensor_parallel: int) -> float:
    """Return the KV bytes per token on one GPU. With more GPUs than KV heads, several GPUs have the same head."""
    heads = max(1.0, model.kv_heads / tensor_parallel)
    return 2 * model.layers * heads * model.head_dim * NUMBER_BYTES[numbers.kv_cache]


def kv_blocks(
    model: Transformer, gpu: Gpu, numbers: NumberFormats, tensor_parallel: int, assumed: Assumptions, block_size: int
) -> int:
    """Return the number of KV blocks that fit into the memory of the GPUs beside the weights."""
    weights = model.parameters * NUMBER_BYTES[numbers.weights] / tensor_parallel
    room = gpu.memory_gib * GIB * assumed.memory_share - assumed.reserved_gib * GIB
    blocks = int((room - weights) // (kv_bytes_token(model, numbers, tensor_parallel) * block_size))
    if blocks < 1:
        raise ConfigError(
            f"the weights take {weights / GIB:.1f} GiB on each of {tensor_parallel} GPUs, but {room / GIB:.1f} GiB are "
            "available for weights and KV cache; use more GPUs or smaller number formats"
        )
    return blocks
