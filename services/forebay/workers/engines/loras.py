"""The adapters of an engine by name, as vLLM and TensorRT-LLM want them: each has a number that was never another's."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import msgspec

from forebay.workers.engine import EngineRefused

CONFIG = "adapter_config.json"


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA; `number` is the engine's `lora_int_id`."""

    name: str
    number: int
    directory: str


class Loras:
    """Which adapters are loaded. Loading itself is the engine's."""

    def __init__(self) -> None:
        self._loaded: dict[str, Adapter] = {}
        self._names: set[str] = set()  # of all that ever were: their blocks may still be cached under their names
        self._numbers = 0

    @property
    def loaded(self) -> Mapping[str, Adapter]:
        """The adapters by name."""
        return MappingProxyType(self._loaded)

    def offered(self, name: str, directory: str) -> Adapter | None:
        """An adapter to load, or None if it is loaded already. Raises EngineRefused."""
        if not name or not directory:
            raise EngineRefused("an adapter is loaded by lora_name and lora_path: both are needed")
        if (known := self._loaded.get(name)) is not None:
            if known.directory == directory:
                return None
            raise EngineRefused(f"the adapter {name} is loaded from {known.directory}: unload it first")
        if not (Path(directory) / CONFIG).is_file():
            raise EngineRefused(f"{directory} is no adapter: it has no {CONFIG}")
        self._numbers += 1
        return Adapter(name, self._numbers, directory)

    def is_reused(self, name: str) -> bool:
        """Whether blocks of another adapter may be cached under this name."""
        return name in self._names

    def add(self, adapter: Adapter) -> None:
        """The engine has it."""
        self._loaded[adapter.name] = adapter
        self._names.add(adapter.name)

    @contextmanager
    def removing(self, name: str) -> Iterator[Adapter]:
        """An adapter that is to go: no new request gets it. If the engine refuses it stays. Raises EngineRefused."""
        if (adapter := self._loaded.pop(name, None)) is None:
            known = ", ".join(self._loaded) or "none"
            raise EngineRefused(f"there is no adapter {name!r} to unload; loaded: {known}")
        try:
            yield adapter
        except EngineRefused:
            self._loaded[name] = adapter
            raise
