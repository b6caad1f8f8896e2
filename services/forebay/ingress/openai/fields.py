"""Base of request bodies: known fields are typed, and unknown fields are rejected by name.

An unsupported field is accepted if its value has no effect, for example `n: 1`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from forebay.ingress.errors import ApiError, invalid

Neutral = Mapping[str, tuple[Any, ...]]  # unsupported fields, with the values that have no effect


class Body(BaseModel):
    """Base of every body and of its parts. Unknown fields are kept for `reject_extra`.

    Attributes:
        neutral: unsupported fields, with the values that have no effect and are accepted.
        ignored: fields that are accepted with any value and have no effect.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    neutral: ClassVar[Neutral] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    _size_bytes: int = PrivateAttr(0)

    @property
    def size_bytes(self) -> int:
        """Number of bytes that the body was parsed from, 0 for a part of a body."""
        return self._size_bytes

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON schema, including the fields that `reject_extra` accepts."""
        schema = handler(core_schema)
        found = handler.resolve_ref_schema(schema)
        properties: dict[str, Any] = found.setdefault("properties", {})
        for name, values in sorted(cls.neutral.items()):
            properties.setdefault(
                name, {"enum": list(values), "description": "Not supported; accepts only values without effect."}
            )
        for name in sorted(cls.ignored):
            properties.setdefault(name, {"description": "Ignored."})
        found["additionalProperties"] = False
        cls.describe(found)
        return schema

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        """Add the constraints of the class's validators to a JSON schema."""


class CheckedBody(Body):
    """Base of a body, or of a part at a fixed path, that rejects unsupported fields when it is validated.

    Attributes:
        path: path of the part in the request, with a dot at its end; empty for a body.
    """

    path: ClassVar[str] = ""

    @model_validator(mode="after")
    def _reject_extra(self) -> Self:
        reject_extra(self, self.path)
        return self


BodyT = TypeVar("BodyT", bound=Body)


def reject_extra(body: Body, where: str) -> None:
    """Raise ApiError for an unknown parameter, or an unsupported one with a value that would have an effect."""
    for name, value in (body.model_extra or {}).items():
        if name in body.ignored:
            continue
        accepted = body.neutral.get(name)
        if accepted is None:
            raise invalid(f"unknown parameter: {where}{name}", f"{where}{name}", "unknown_parameter")
        # In Python 0 equals False and 1 equals True, in JSON they differ; 0.0 equals 0 in both.
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in accepted):
            if name in ("n", "best_of"):
                raise invalid(f"{where}{name} must be 1", f"{where}{name}", "unsupported_parameter")
            raise invalid(f"{where}{name} is not supported", f"{where}{name}", "unsupported_parameter")


def at_most(count: int) -> BeforeValidator:
    """Return a validator that rejects an object with more than `count` members.

    It runs before the members are validated, because each invalid member would add an error. Lists have pydantic's
    `max_length`, which is checked first, or `fail_fast`, for the same reason.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"it has {len(value)} members, the limit is {count}")
        return value

    return BeforeValidator(check)


def parse(kind: type[BodyT], raw: bytes) -> BodyT:
    """Return the parsed body of a request. Raises ApiError that names the first invalid field."""
    try:
        return _sized(kind.model_validate_json(raw), raw)
    except ValidationError as failure:
        if (rewritten := _with_integers(raw, failure)) is None:
            raise _first_error(failure) from failure
    try:
        return _sized(kind.model_validate_json(rewritten), raw)
    except ValidationError as error:
        raise _first_error(error) from error


def _sized(body: BodyT, raw: bytes) -> BodyT:
    body._size_bytes = len(raw)
    return body


def _with_integers(raw: bytes, failure: ValidationError) -> bytes | None:
    """Return the body with integral floats such as 5.0 written as integers, None if no such number was rejected.

    In JSON 5.0 is an integer, but few clients write it. So a body is rewritten only after it was rejected, and once.
    """
    errors = failure.errors(include_url=False, include_context=False)
    if not any(isinstance(one["input"], float) and one["input"].is_integer() for one in errors):
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


def _first_error(error: ValidationError) -> ApiError:
    """Return the error of the first invalid field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    where = _path(first["loc"])
    return invalid(f"{where or 'the body'}: {first['msg']}", where or None)


def _path(location: tuple[int | str, ...]) -> str:
    """Return a location as a path such as `messages[0].content`, without the names of union members."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int"):
            path += f".{step}" if path else step
    return path
