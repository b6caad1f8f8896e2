"""Model and modules of the engine stand-ins: deterministic tokens, one token per step."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from types import ModuleType
from typing import Any

import pytest


def struct(name: str, **defaults: Any) -> Any:
    """Return a type with these fields and defaults, which rejects other fields as the real one does."""
    return make_dataclass(name, [(one, Any, default) for one, default in defaults.items()], kw_only=True, slots=True)


def install_modules(monkeypatch: pytest.MonkeyPatch, contents: Mapping[str, Sequence[Any]]) -> None:
    """Make modules importable, with these classes and functions."""
    for name, values in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        for value in values:
            setattr(module, value.__name__, value)
        monkeypatch.setitem(sys.modules, name, module)


def next_token(tokens: Sequence[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 400 + 3


def answer_of(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]
