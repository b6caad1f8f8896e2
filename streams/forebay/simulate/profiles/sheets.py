"""Descriptions of models and GPUs as published: a model's `config.json`, and values of GPU data sheets."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec

from forebay.events.names import unknown_name
from forebay.runtime.errors import ConfigError, prefixed
from forebay.runtime.files import read_file

Positive = Annotated[float, msgspec.Meta(gt=0.0)]
GATED = {"silu", "swish", "gelu_pytorch_tanh", "gelu_tanh"}  # three matrices: gate, up, down
PLAIN = {"gelu", "gelu_new", "gelu_fast", "gelu_python", "quick_gelu", "relu"}  # two
OTHER_LAYERS = {
    "kv_lora_rank": "multi-head latent attention",
    "mlp_only_layers": "layers with and without experts mixed",
    "linear_num_key_heads": "linear attention",
    "ssm_cfg": "state spaces",
    "mamba_d_state": "state spaces",
    "mamba_num_heads": "state spaces",
}


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values from the data sheet of one GPU."""

    bf16_tflops: Positive  # dense TFLOPS in bf16
    memory_gib: Positive
    memory_tb_s: Positive  # memory bandwidth in 10^12 bytes per second
    link_gb_s: Positive  # bandwidth to the other GPUs of the node in 10^9 bytes per second, one way
    fp8_tflops: Positive | None = None  # dense TFLOPS in fp8; None if the GPU computes in bf16 only
    source: str = ""  # name or address of the data sheet


class Transformer(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Llama-style decoder model. Sizes of weights are numbers of parameters, not bytes."""

    layers: int
    hidden: int
    heads: int  # number of query heads per layer
    kv_heads: int  # number of key and value heads per layer
    head_dim: int
    layer: int  # parameters of one layer without its experts
    head: int  # parameters of the output matrix
    embedding: int  # parameters of the input matrix; 0 if it is shared with the output matrix
    expert: int = 0  # parameters of one expert; 0 for a dense model
    experts: int = 0
    experts_active: int = 0  # experts per token and layer
    fp8: bool = False  # whether the published weights are in fp8

    @property
    def parameters(self) -> int:
        """Return the total number of parameters, including the last norm."""
        return self.layers * (self.layer + self.experts * self.expert) + self.head + self.embedding + self.hidden


def gpu_sheet(name: str) -> Gpu:
    """Return the built-in data sheet of a GPU. Raises ConfigError if there is no built-in sheet of this name."""
    sheets = _sheets()
    if name not in sheets:
        raise ConfigError(unknown_name("GPU", name, sorted(sheets)))
    return sheets[name]


def gpus_like(name: str) -> list[str]:
    """Return the names of the built-in GPUs that begin with `name`."""
    return sorted(one for one in _sheets() if one.startswith(name.lower()))


def _sheets() -> dict[str, Gpu]:
    return msgspec.toml.decode(files(__package__).joinpath("gpus.toml").read_bytes(), type=dict[str, Gpu])


def read_transformer(path: Path) -> Transformer:
    """Read a model's sizes from the `config.json` of Hugging Face's transformers."""
    content = read_file(path)
    with prefixed(path):
        config = msgspec.json.decode(content, type=dict[str, Any])
    inner = config.get("text_config")
    if isinstance(inner, dict) and "hidden_size" not in config:
        config = {**config, **inner}
    with prefixed(path):
        return _transformer(config)


def _transformer(config: dict[str, Any]) -> Transformer:
    for key, what in OTHER_LAYERS.items():
        if config.get(key):
            raise ConfigError(f"{key}: the roofline model does not support {what}; fit a profile instead")
    if config.get("decoder_sparse_step", 1) != 1 or config.get("first_k_dense_replace", 0):
        text = "the roofline model does not support a mix of layers with and without experts; fit a profile instead"
        raise ConfigError(text)
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads", heads)
    head_dim = _number(config, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    matrices = _mlp_matrices(config)
    attention = 2 * hidden * (heads + kv_heads) * head_dim
    experts = next((_number(config, key) for key in ("num_local_experts", "num_experts") if config.get(key)), 0)
    mlp = expert = 0
    if experts:
        expert = matrices * hidden * _number(config, "moe_intermediate_size", _number(config, "intermediate_size", 0))
        mlp = hidden * experts + matrices * hidden * _number(config, "shared_expert_intermediate_size", 0)
        if not expert:
            raise ConfigError("a model with experts needs moe_intermediate_size or intermediate_size")
    else:
        mlp = matrices * hidden * _number(config, "intermediate_size")
    active = _number(config, "num_experts_per_tok") if experts else 0
    if active > experts:
        raise ConfigError(f"num_experts_per_tok ({active}) exceeds the number of experts ({experts})")
    vocabulary = hidden * _number(config, "vocab_size")
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layer=attention + mlp + 2 * hidden,  # with its two norms
        head=vocabulary,
        embedding=0 if config.get("tie_word_embeddings") else vocabulary,
        expert=expert,
        experts=experts,
        experts_active=active,
        fp8=(config.get("quantization_config") or {}).get("quant_method") == "fp8",
    )


def _mlp_matrices(config: dict[str, Any]) -> int:
    activation = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    if activation in GATED:
        return 3
    if activation in PLAIN:
        return 2
    raise ConfigError(f"hidden_act: {unknown_name('activation', activation, sorted(GATED | PLAIN))}")


def _number(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"missing key {key}, which every Llama-style model has")
    if not isinstance(value, int) or isinstance(value, bool) or value < (1 if default is None else 0):
        raise ConfigError(f"{key} must be a positive integer, not {value!r}")
    return value
