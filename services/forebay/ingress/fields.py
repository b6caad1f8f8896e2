"""What request bodies have in common: known fields are typed, unknown ones are refused by name.

A field that is not served is taken all the same while its value asks for nothing.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, ValidationError

from forebay.ingress.errors import invalid

Neutral = Mapping[str, tuple[Any, ...]]  # fields that are not served, with the values that ask for nothing
NONE_NEUTRAL: Neutral = {}


class Body(BaseModel):
    """The base of every body and part of one. Other fields are kept, for `refuse_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    _size_bytes: int = PrivateAttr(0)

    @property
    def size_bytes(self) -> int:
        """The bytes that it was parsed from, 0 for a part of a body."""
        return self._size_bytes


BodyT = TypeVar("BodyT", bound=Body)


def refuse_extra(body: Body, where: str, neutral: Neutral, ignored: frozenset[str] = frozenset()) -> None:
    """Raise ApiError for a parameter that is not served, or that nobody knows."""
    for name, value in (body.model_extra or {}).items():
        if name in ignored:
            continue
        accepted = neutral.get(name)
        if accepted is None:
            raise invalid(f"unknown parameter: {where}{name}", f"{where}{name}", "unknown_parameter")
        # In Python 0 is False and 1 is True, on the wire they are not; but 0.0 is 0 on both.
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in accepted):
            if name in ("n", "best_of"):
                raise invalid(f"{where}{name} must be 1", f"{where}{name}", "unsupported_parameter")
            raise invalid(f"{where}{name} is not supported", f"{where}{name}", "unsupported_parameter")


def at_most(count: int) -> BeforeValidator:
    """Refuses an object with more members before they are looked at, else each of them could be an error to keep.

    Lists have pydantic's `max_length`, which is looked at first, or `fail_fast`, for the same reason.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"it takes up to {count} members, not {len(value)}")
        return value

    return BeforeValidator(check)


def parse(kind: type[BodyT], raw: bytes) -> BodyT:
    """A request body. Raises ApiError naming the first thing that is wrong with it."""
    try:
        body = kind.model_validate_json(raw)
        body._size_bytes = len(raw)
        return body
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise invalid(f"the body is not valid JSON: {first['msg']}", code="invalid_json") from error
        where = _path(first["loc"])
        raise invalid(f"{where or 'the body'}: {first['msg']}", where or None) from error


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` from a location; the names of union members are left out."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int"):
            path += f".{step}" if path else step
    return path
