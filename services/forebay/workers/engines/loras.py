"""LoRA adapters of an engine by name, each with a number that is never reused, as vLLM and TensorRT-LLM require."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import msgspec

from forebay.workers.engine import EngineRefused

CONFIG = "adapter_config.json"


class LoraAdapter(msgspec.Struct, frozen=True):
    """LoRA adapter; `number` is the engine's `lora_int_id`."""

    name: str
    number: int
    directory: str


class Loras:
    """Registry of the loaded adapters. The engine does the loading."""

    def __init__(self) -> None:
        self._loaded: dict[str, LoraAdapter] = {}
        self._names: set[str] = set()  # of all adapters ever loaded: their blocks may still be cached under their names
        self._numbers = 0

    @property
    def loaded(self) -> Mapping[str, LoraAdapter]:
        """The loaded adapters by name."""
        return MappingProxyType(self._loaded)

    def offered(self, name: str, directory: str) -> LoraAdapter | None:
        """Return a new adapter to load, or None if it is already loaded. Raises EngineRefused."""
        if not name or not directory:
            raise EngineRefused("lora_name and lora_path are both required to load an adapter")
        if (known := self._loaded.get(name)) is not None:
            if known.directory == directory:
                return None
            raise EngineRefused(f"the adapter {name} is already loaded from {known.directory}: unload it first")
        if not (Path(directory) / CONFIG).is_file():
            raise EngineRefused(f"{directory} is not an adapter: it has no {CONFIG}")
        self._numbers += 1
        return LoraAdapter(name, self._numbers, directory)

    def is_reused(self, name: str) -> bool:
        """Return whether blocks of another adapter may be cached under this name."""
        return name in self._names

    def add(self, adapter: LoraAdapter) -> None:
        """Register a loaded adapter."""
        self._loaded[adapter.name] = adapter
        self._names.add(adapter.name)

    @contextmanager
    def removing(self, name: str) -> Iterator[LoraAdapter]:
        """Unregister an adapter while the engine unloads it; restore it if the engine refuses. Raises EngineRefused."""
        if (adapter := self._loaded.pop(name, None)) is None:
            known = ", ".join(self._loaded) or "none"
            raise EngineRefused(f"the adapter {name!r} is not loaded; loaded: {known}")
        try:
            yield adapter
        except EngineRefused:
            self._loaded[name] = adapter
            raise
