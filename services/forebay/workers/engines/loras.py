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
    """Registry of the loaded adapters. The engine does the loading.

    With `keeps_numbers` a name keeps its directory and number for ever, for an engine that cannot clear its cache.
    """

    def __init__(self, *, keeps_numbers: bool = False) -> None:
        self._keeps_numbers = keeps_numbers
        self._loaded: dict[str, LoraAdapter] = {}
        self._past: dict[str, LoraAdapter] = {}  # all adapters ever loaded: their blocks may still be cached
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
        past = self._past.get(name) if self._keeps_numbers else None
        if past is not None:
            if past.directory != directory:
                raise EngineRefused(f"the adapter {name} was loaded from {past.directory}: use another name")
            return past
        self._numbers += 1
        return LoraAdapter(name, self._numbers, directory)

    def is_reused(self, name: str) -> bool:
        """Return whether blocks of another adapter may be cached under this name."""
        return name in self._past and not self._keeps_numbers

    def add(self, adapter: LoraAdapter) -> None:
        """Register a loaded adapter."""
        self._loaded[adapter.name] = adapter
        self._past[adapter.name] = adapter

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
