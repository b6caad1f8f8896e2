"""Checks of the values that official clients return."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

NAME = "forebay-default"


def checked(value: Any, *extensions: str) -> Any:
    """Return a value of an official client, after a check that it has the declared type and no unknown field.

    The clients validate nothing. `extensions` are unknown fields that are allowed.
    """
    found = type(value).model_validate(value.to_dict())
    assert list(_unknown(found, extensions)) == []
    return value


def _unknown(value: Any, extensions: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, BaseModel):
        extra = value.model_extra or {}
        yield from (f"{type(value).__name__}.{name}" for name in extra.keys() - set(extensions))
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), extensions)
    elif isinstance(value, list):
        for one in value:
            yield from _unknown(one, extensions)
