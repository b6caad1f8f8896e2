"""Names of the engines, without loading one."""

from dataclasses import dataclass

MOCK = "mock"


@dataclass(frozen=True, slots=True)
class Adapter:
    """Class of a real engine, and the packages it imports. The extra that installs them has the engine's name.

    `context_argument` is the engine's own argument for the context length. `encoder` are the module and the class of an
    engine for the role encode; empty if there is none.
    """

    module: str
    name: str
    packages: tuple[str, ...]
    context_argument: str
    encoder: tuple[str, str] | tuple[()] = ()


ADAPTERS = {
    "vllm": Adapter(
        "forebay.workers.engines.vllm.engine",
        "VllmEngine",
        ("vllm",),
        "max_model_len",
        ("forebay.workers.engines.vllm.encoder", "VllmEncodeEngine"),
    ),
    "sglang": Adapter("forebay.workers.engines.sglang.engine", "SglangEngine", ("sglang",), "context_length"),
    "tensorrt-llm": Adapter(
        "forebay.workers.engines.tensorrt_llm.engine", "TensorRtLlmEngine", ("tensorrt_llm",), "max_seq_len"
    ),
}
ENGINES = (MOCK, *ADAPTERS)
