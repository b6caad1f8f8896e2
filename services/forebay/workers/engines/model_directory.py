"""Check a model directory before the engine loads it, because engines report such errors only in their own logs."""

import importlib.util

from forebay.workers.engine import EngineError
from forebay.workers.engines.settings import EngineSettings

TEXT_CHARS_MAX = 500
SAFETENSORS = "*.safetensors"
WEIGHTS = (SAFETENSORS, "*.bin", "*.pt", "*.pth", "*.gguf")


def one_line(error: BaseException) -> str:
    """Return the message of an exception as one line of at most `TEXT_CHARS_MAX` characters."""
    return " ".join(str(error).split())[:TEXT_CHARS_MAX] or type(error).__name__


def check_model(settings: EngineSettings) -> None:
    """Check that the model directory exists and has a configuration and readable weights.

    Raises:
        EngineError: the directory cannot be used. The message tells why.
    """
    directory = settings.model
    if not directory.is_dir():
        raise EngineError(f"no such model directory: {directory}")
    if not (directory / "config.json").is_file():
        raise EngineError(f"{directory} is not a model directory: it has no config.json")
    if settings.arguments.get("load_format", "auto") != "auto":
        return
    if not any(True for pattern in WEIGHTS for _ in directory.glob(pattern)):
        raise EngineError(f"the model directory {directory} has no weights: expected {', '.join(WEIGHTS)}")
    if importlib.util.find_spec("safetensors") is None:  # a dependency of every engine
        return
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - comes with the engines

    for weights in directory.glob(SAFETENSORS):
        try:
            with safe_open(weights, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise EngineError(f"the weights {weights} are broken: {one_line(error)}") from None
