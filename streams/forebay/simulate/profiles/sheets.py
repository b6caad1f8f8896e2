"""Models and GPUs as their publishers describe them: `config.json` of a model, figures of a data sheet."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0.0)]
FILE_BYTES_MAX = 1 << 20  # a profile is a page, a model's description some more
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


class ProfileUnusable(ValueError):
    """A profile, or a file that it names, that says nothing usable; the text says where and why."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a data sheet says of one GPU; TFLOPS are dense, without `fp8_tflops` it computes in bf16 only.

    Attributes:
        link_gb_s: what it sends to the others of its node, one way.
    """

    bf16_tflops: Positive
    memory_gib: Positive
    memory_tb_s: Positive
    link_gb_s: Positive
    fp8_tflops: Positive | None = None
    source: str = ""


class Transformer(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a decoder with Llama's kind of layers; parameters in numbers, not bytes.

    Attributes:
        layer: parameters of one layer without its experts.
        expert: parameters of one expert; `experts` a layer, of which a token goes to `experts_active`.
        head: of the output matrix; `embedding` of the input matrix, 0 where the two are one.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layer: int
    head: int
    embedding: int
    expert: int = 0
    experts: int = 0
    experts_active: int = 0
    fp8: bool = False

    @property
    def parameters(self) -> int:
        """All of them; `hidden` are of the last norm."""
        return self.layers * (self.layer + self.experts * self.expert) + self.head + self.embedding + self.hidden


def gpu_sheet(name: str) -> Gpu:
    """The built-in sheet of a GPU. Raises ProfileUnusable."""
    sheets = _sheets()
    if name not in sheets:
        meant = gpus_like(name) or sorted(sheets)
        raise ProfileUnusable(f"there is no data sheet of {name!r}; there is {', '.join(meant)}")
    return sheets[name]


def gpus_like(name: str) -> list[str]:
    """The GPUs with a built-in sheet whose names begin so."""
    return sorted(one for one in _sheets() if one.startswith(name.lower()))


def _sheets() -> dict[str, Gpu]:
    return msgspec.toml.decode(files(__package__).joinpath("gpus.toml").read_bytes(), type=dict[str, Gpu])


def read_transformer(path: Path) -> Transformer:
    """The model that a `config.json` of Hugging Face's transformers describes. Raises ProfileUnusable."""
    try:
        config = msgspec.json.decode(read_file(path), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProfileUnusable(f"{path}: {error}") from None
    inner = config.get("text_config")
    if isinstance(inner, dict) and "hidden_size" not in config:
        config = {**config, **inner}
    try:
        return _transformer(config)
    except ProfileUnusable as error:
        raise ProfileUnusable(f"{path}: {error}") from None


def read_file(path: Path) -> bytes:
    """A small file. Raises ProfileUnusable."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ProfileUnusable(f"{path}: {error.strerror}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ProfileUnusable(f"{path}: larger than {FILE_BYTES_MAX} bytes, which nothing of this kind is")
    return content


def _transformer(config: dict[str, Any]) -> Transformer:
    for key, what in OTHER_LAYERS.items():
        if config.get(key):
            raise ProfileUnusable(f"{key} says {what}, which the roofline does not describe: fit a profile instead")
    if config.get("decoder_sparse_step", 1) != 1 or config.get("first_k_dense_replace", 0):
        raise ProfileUnusable("layers with and without experts mixed, which the roofline does not describe")
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads", heads)
    head_dim = _number(config, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise ProfileUnusable(f"{heads} heads cannot share {kv_heads} of keys and values evenly")
    matrices = _mlp_matrices(config)
    attention = 2 * hidden * (heads + kv_heads) * head_dim
    experts = next((_number(config, key) for key in ("num_local_experts", "num_experts") if config.get(key)), 0)
    mlp = expert = 0
    if experts:
        expert = matrices * hidden * _number(config, "moe_intermediate_size", _number(config, "intermediate_size", 0))
        mlp = hidden * experts + matrices * hidden * _number(config, "shared_expert_intermediate_size", 0)
        if not expert:
            raise ProfileUnusable("it has experts, and neither moe_intermediate_size nor intermediate_size")
    else:
        mlp = matrices * hidden * _number(config, "intermediate_size")
    active = _number(config, "num_experts_per_tok") if experts else 0
    if active > experts:
        raise ProfileUnusable(f"num_experts_per_tok ({active}) is more than there are ({experts})")
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
    raise ProfileUnusable(f"hidden_act {activation!r} is not known, so neither is how many matrices a layer has")


def _number(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ProfileUnusable(f"it has no {key}, which models with Llama's kind of layers have")
    if not isinstance(value, int) or isinstance(value, bool) or value < (1 if default is None else 0):
        raise ProfileUnusable(f"{key} must be a positive integer, not {value!r}")
    return value
