"""Rules for the choice of pools as decoded data: in TOML files, with one entry per model, and in request bodies."""

from pathlib import Path
from typing import Annotated, Any

import msgspec

from forebay.events.names import unknown_name
from forebay.events.pools import PoolRouting
from forebay.runtime.errors import ConfigError, prefixed
from forebay.runtime.files import read_toml
from forebay.simulate.field_descriptions import converted

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class ModelRouting(PoolRouting, frozen=True, kw_only=True):
    name: Name

    @property
    def routing(self) -> PoolRouting:
        """The rules without the name of the model."""
        return PoolRouting(grids=self.grids, retry=self.retry)


class _File(msgspec.Struct, frozen=True, kw_only=True):
    models: tuple[ModelRouting, ...]


def pool_routing(raw: dict[str, Any], noun: str = "key") -> PoolRouting:
    """Return the rules in decoded data. Raises ConfigError for an invalid key, which it calls a `noun`."""
    return converted(raw, PoolRouting, noun)


def read_pool_routing(path: Path) -> dict[str, PoolRouting]:
    """Read the rules of a TOML file, by model. Raises ConfigError for an unreadable file or an invalid key."""
    raw = read_toml(path)
    with prefixed(path):
        models = converted(raw, _File, "key").models
        require_unique(models)
    return {model.name: model.routing for model in models}


def routing_of(path: Path, model: str) -> PoolRouting:
    """Return the rules of a model in a TOML file. Raises ConfigError if they are missing or unusable."""
    found = read_pool_routing(path)
    if model not in found:
        raise ConfigError(f"{path}: {unknown_name('model', model, found)}")
    return found[model]


def require_unique(models: tuple[ModelRouting, ...]) -> None:
    """Raise ConfigError if a model has two entries."""
    seen: set[str] = set()
    for at, model in enumerate(models):
        if model.name in seen:
            raise ConfigError(f"models[{at}].name: duplicate model {model.name!r}")
        seen.add(model.name)
