"""Stand-ins for two packages that SGLang imports and that have no build for CPUs: `sgl_kernel` and `torchvision`.

`make setup-sglang` puts this module and `sglang_cpu.pth`, which imports it, into the environment. So every process has
the stand-ins, also those that SGLang starts. Any name can be imported from them, but not called.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = ("sgl_kernel", "torchvision")


class NoBuild(type):
    """Metaclass of the classes that stand for every function, class and constant of the packages."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NoBuild(name, (), {"__module__": f"{cls.__module__}.{cls.__name__}"})

    def __call__(cls, *_: object, **__: object) -> None:
        raise NotImplementedError(f"{cls.__module__}.{cls.__name__} has no build for CPUs")


class StandIn(ModuleType):
    __version__ = "0"  # transformers compares it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NoBuild(name, (), {"__module__": self.__name__})


class StandInFinder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module creates a name when it is used."""


sys.meta_path.append(StandInFinder())
