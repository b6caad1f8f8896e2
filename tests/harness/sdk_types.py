"""Check objects of an API against the types of its official Python client, which accept unknown fields themselves."""

import functools
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, TypeAdapter


def validated(kind: Any, value: Any, *extensions: str) -> Any:
    """Return a JSON value as the type `kind` of a client. Raises if a field is missing, invalid or unknown.

    `extensions` are unknown fields that are allowed.
    """
    found = _adapter(kind).validate_python(value)
    names = _unknown(found, kind.__name__ if isinstance(kind, type) else "")
    unknown = [name for name in names if name.rpartition(".")[2] not in extensions]
    assert not unknown, f"the client does not know {', '.join(unknown)}"
    return found


_adapter = functools.cache(TypeAdapter)  # building one takes a second


def _unknown(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from (f"{path}.{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _unknown(one, f"{path}[{number}]")
