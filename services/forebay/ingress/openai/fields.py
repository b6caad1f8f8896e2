"""What request bodies have in common: known fields are typed, unknown ones are refused by name.

A field that is not served is taken all the same while its value asks for nothing.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler, PrivateAttr, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from forebay.ingress.errors import ApiError, invalid

Neutral = Mapping[str, tuple[Any, ...]]  # fields that are not served, with the values that ask for nothing


class Body(BaseModel):
    """The base of every body and part of one. Other fields are kept, for `refuse_extra`.

    Attributes:
        neutral: fields of other APIs that are not served, with the values that ask for nothing.
        ignored: fields of other APIs that change nothing.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    neutral: ClassVar[Neutral] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    _size_bytes: int = PrivateAttr(0)

    @property
    def size_bytes(self) -> int:
        """The bytes that it was parsed from, 0 for a part of a body."""
        return self._size_bytes

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema of what `refuse_extra` accepts."""
        schema = handler(core_schema)
        found = handler.resolve_ref_schema(schema)
        properties: dict[str, Any] = found.setdefault("properties", {})
        for name, values in sorted(cls.neutral.items()):
            properties.setdefault(name, {"enum": list(values), "description": "Not served: takes neutral values."})
        for name in sorted(cls.ignored):
            properties.setdefault(name, {"description": "Ignored."})
        found["additionalProperties"] = False
        cls.describe(found)
        return schema

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        """Add to a JSON schema what the validators of the class demand beyond the types of its fields."""


BodyT = TypeVar("BodyT", bound=Body)


def refuse_extra(body: Body, where: str) -> None:
    """Raise ApiError for a parameter that is not served, or that nobody knows."""
    for name, value in (body.model_extra or {}).items():
        if name in body.ignored:
            continue
        accepted = body.neutral.get(name)
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
        return _sized(kind.model_validate_json(raw), raw)
    except ValidationError as failure:
        if (rewritten := _with_integers(raw, failure)) is None:
            raise _refused(failure) from failure
    try:
        return _sized(kind.model_validate_json(rewritten), raw)
    except ValidationError as error:
        raise _refused(error) from error


def _sized(body: BodyT, raw: bytes) -> BodyT:
    body._size_bytes = len(raw)
    return body


def _with_integers(raw: bytes, failure: ValidationError) -> bytes | None:
    """Return a body with 5 in the place of 5.0, which is an integer in JSON; None if no such number was refused.

    Few clients write integers so. Therefore a body is looked at again only after it was refused, and once.
    """
    refused = failure.errors(include_url=False, include_context=False)
    if not any(isinstance(one["input"], float) and one["input"].is_integer() for one in refused):
        return None
    try:
        return msgspec.json.encode(_integral(msgspec.json.decode(raw)))
    except (msgspec.MsgspecError, RecursionError, OverflowError):
        return None


def _integral(value: Any) -> Any:
    match value:
        case float():
            return int(value) if value.is_integer() else value
        case list():
            return [_integral(one) for one in value]
        case dict():
            return {name: _integral(one) for name, one in value.items()}
        case _:
            return value


def _refused(error: ValidationError) -> ApiError:
    """Return the first thing that is wrong with a body."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    where = _path(first["loc"])
    return invalid(f"{where or 'the body'}: {first['msg']}", where or None)


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` from a location; the names of union members are left out."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int"):
            path += f".{step}" if path else step
    return path
