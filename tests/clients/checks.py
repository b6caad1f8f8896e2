"""Checks of the values that official clients return."""

from typing import Any

from tests.harness.sdk_types import validated

NAME = "forebay-default"


def checked(value: Any, *extensions: str) -> Any:
    """Return a value of an official client, which validates nothing itself. Raises if the type does not match.

    `extensions` are unknown fields that are allowed.
    """
    validated(type(value), value.to_dict(), *extensions)
    return value
