"""Names of the engines, without loading one."""

from dataclasses import dataclass

MOCK = "mock"


@dataclass(frozen=True, slots=True)
class Adapter:
    """Class of a real engine, and the packages it imports. The extra that installs them has the engine's name."""

    module: str
    name: str
    packages: tuple[str, ...]


ADAPTERS = {
    "vllm": Adapter("forebay.workers.engines.vllm.engine", "VllmEngine", ("vllm",)),
    "sglang": Adapter("forebay.workers.engines.sglang.engine", "SglangEngine", ("sglang",)),
    "tensorrt-llm": Adapter("forebay.workers.engines.tensorrt_llm.engine", "TensorRtLlmEngine", ("tensorrt_llm",)),
}
ENGINES = (MOCK, *ADAPTERS)
