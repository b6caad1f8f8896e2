"""Registry of an engine's LoRA adapters. vLLM and TensorRT-LLM require a number per adapter that is never reused."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from forebay.workers.adapter_cache import CONFIG
from forebay.workers.engine import EngineRefused


class LoraAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter of an engine, which identifies it by `number` (`lora_int_id`)."""

    name: str
    number: int
    directory: str
    digest: str = ""


class Loras:
    """Registry of the adapters that an engine has loaded. It does not load them itself.

    Args:
        keeps_numbers: whether a name keeps its directory and number for ever, even after the adapter was unloaded. An
            engine needs this if it cannot clear its KV cache, because it finds cached blocks by number.
        checks_directories: whether the directories are on this machine.
    """

    def __init__(self, *, keeps_numbers: bool = False, checks_directories: bool = True) -> None:
        self._keeps_numbers = keeps_numbers
        self._checks_directories = checks_directories
        self.loaded: dict[str, LoraAdapter] = {}
        self._past: dict[str, LoraAdapter] = {}  # all adapters ever loaded: their blocks may still be cached
        self._numbers = 0

    def offered(self, name: str, directory: str, digest: str = "") -> LoraAdapter | None:
        """Return the adapter that the engine must load for a command; None if it is already loaded.

        `digest` is that of the files, if they cannot change. Raises EngineRefused if the directory contains no adapter,
        or the name is in use for another directory.
        """
        if not name or not directory:
            raise EngineRefused("lora_name and lora_path are both required to load an adapter")
        if (known := self.loaded.get(name)) is not None:
            if known.directory == directory:
                return None
            raise EngineRefused(
                f"the adapter {name} is already loaded from {known.directory}; unload it first, or use another name"
            )
        if self._checks_directories and not (Path(directory) / CONFIG).is_file():
            raise EngineRefused(f"{directory} is not an adapter: it has no {CONFIG}")
        past = self._past.get(name) if self._keeps_numbers else None
        if past is not None:
            if past.directory != directory:
                raise EngineRefused(
                    f"the name {name} was used for {past.directory}, and this engine may have cached blocks of it:"
                    " use another name"
                )
            return past
        self._numbers += 1
        return LoraAdapter(name, self._numbers, directory, digest)

    def is_reused(self, adapter: LoraAdapter) -> bool:
        """Return whether the KV cache may contain blocks of another adapter with the name of this one."""
        past = self._past.get(adapter.name)
        is_same = past is not None and adapter.digest and past.digest == adapter.digest
        return past is not None and not is_same and not self._keeps_numbers

    def add(self, adapter: LoraAdapter) -> None:
        self.loaded[adapter.name] = adapter
        self._past[adapter.name] = adapter

    @contextmanager
    def removing(self, name: str) -> Iterator[LoraAdapter]:
        """Return a context in which the engine unloads an adapter. The adapter is no longer registered in it.

        If the engine raises EngineRefused in the context, the adapter is registered again. Raises EngineRefused if the
        adapter is not loaded.
        """
        if (adapter := self.loaded.pop(name, None)) is None:
            known = ", ".join(self.loaded) or "none"
            raise EngineRefused(f"the adapter {name!r} is not loaded; loaded: {known}")
        try:
            yield adapter
        except EngineRefused:
            self.loaded[name] = adapter
            raise
