"""An engine's timing and its memory from a model's description and a GPU's data sheet.

A step takes as long as the slower of computing and reading does (Williams, Waterman, Patterson: Roofline, CACM 2009),
and what is on top of that. A weight costs two FLOPs a token (Kaplan et al. 2020, section 2.1), a (query, key) pair four
for each number of a head: the product with the key, and that with the value. Every step reads all weights that its
tokens go through, and the keys and values of what it attends to, once.
"""

from typing import Annotated, Literal

import msgspec

from forebay.engine_model.timing import RooflineTiming
from forebay.simulate.profiles.sheets import Gpu, ProfileUnusable, Transformer

GIB = 1 << 30
ACTIVATION_BYTES = 2  # of a number between layers: bf16
REDUCTIONS = 2  # a layer: after attention, and after the MLP
NUMBER_BYTES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5}
Share = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
Microseconds = Annotated[float, msgspec.Meta(ge=0.0)]


class Assumed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What no data sheet says. Defaults are round figures, not measurements; docs/engine-profiles.md has their effect.

    Attributes:
        compute: share of the sheet's FLOPS that large matrices get.
        memory: share of the sheet's bandwidth that reading gets.
        link: share of the sheet's link bandwidth that an all-reduce gets.
        reduce_us: what one all-reduce takes, however little there is to send.
        overhead_us: what a step takes beside the model: scheduling, sampling, starting kernels.
        memory_share: share of a GPU's memory that the engine takes.
        reserved_gib: of that, for activations and what is captured.
    """

    compute: Share = 0.7
    memory: Share = 0.8
    link: Share = 0.7
    reduce_us: Microseconds = 8.0
    overhead_us: Microseconds = 500.0
    memory_share: Share = 0.9
    reserved_gib: Annotated[float, msgspec.Meta(ge=0.0)] = 2.0


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that a weight and a number of the KV cache take. int4 is computed in bf16."""

    weights: Literal["bf16", "fp8", "int4"]
    kv_cache: Literal["bf16", "fp8"]


def roofline(model: Transformer, gpu: Gpu, numbers: Numbers, tensor_parallel: int, assumed: Assumed) -> RooflineTiming:
    """The timing of an engine on `tensor_parallel` GPUs that share every matrix. Raises ProfileUnusable."""
    tflops = gpu.fp8_tflops if numbers.weights == "fp8" else gpu.bf16_tflops
    if tflops is None:
        raise ProfileUnusable("this GPU does not compute in fp8: its sheet has no fp8_tflops")
    if model.heads % tensor_parallel:
        raise ProfileUnusable(f"{model.heads} attention heads cannot be shared by {tensor_parallel} GPUs")
    weight = NUMBER_BYTES[numbers.weights] / tensor_parallel
    compute = 2 / tensor_parallel
    experts = model.layers * model.experts
    parallel = {}
    if tensor_parallel > 1:
        # A ring sends 2 (n-1)/n of what is reduced from every GPU.
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


def kv_bytes_token(model: Transformer, numbers: Numbers, tensor_parallel: int) -> float:
    """Keys and values of one token on one GPU; what cannot be shared is held by several."""
    heads = max(1.0, model.kv_heads / tensor_parallel)
    return 2 * model.layers * heads * model.head_dim * NUMBER_BYTES[numbers.kv_cache]


def kv_blocks(
    model: Transformer, gpu: Gpu, numbers: Numbers, tensor_parallel: int, assumed: Assumed, block_size: int
) -> int:
    """KV blocks that fit beside the weights. Raises ProfileUnusable when not one does."""
    weights = model.parameters * NUMBER_BYTES[numbers.weights] / tensor_parallel
    room = gpu.memory_gib * GIB * assumed.memory_share - assumed.reserved_gib * GIB
    blocks = int((room - weights) // (kv_bytes_token(model, numbers, tensor_parallel) * block_size))
    if blocks < 1:
        raise ProfileUnusable(
            f"the weights take {weights / GIB:.1f} GiB of each of {tensor_parallel} GPUs, which have "
            f"{room / GIB:.1f} GiB for them and the KV cache: more GPUs, or smaller numbers"
        )
    return blocks
