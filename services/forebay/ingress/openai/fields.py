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
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from forebay.events.names import unknown_name
from forebay.ingress.errors import ApiError, invalid

IGNORES_UNKNOWN = {"unknown": "ignore"}  # context of pydantic's validation
Neutral = Mapping[str, tuple[Any, ...]]  # unsupported fields, with the values that have no effect


class Body(BaseModel):
    """Base of every request body and of its parts. Parsing keeps unknown fields, which `reject_extra` checks later.

    Attributes:
        neutral: unsupported fields, each with the values that are accepted because they would have no effect.
        ignored: fields that are accepted with any value and have no effect.
        size_bytes: size of the encoded body in bytes; 0 for a part of a body.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    neutral: ClassVar[Neutral] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    # Not a private attribute of pydantic, which initialises these again for each class in the hierarchy of each part.
    size_bytes: ClassVar[int] = 0

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
        """Add to the JSON schema of the class the constraints that only its validators check. Default: none."""


class CheckedBody(Body):
    """Base of request bodies, and of their parts with a fixed path, that reject unsupported fields when parsed.

    The `path` of a part ends with a dot; it is empty for a whole body.
    """

    path: ClassVar[str] = ""

    @model_validator(mode="after")
    def _reject_extra(self, info: ValidationInfo) -> Self:
        if info.context == IGNORES_UNKNOWN:
            _drop_unknown(self)
        reject_extra(self, self.path)
        return self


BodyT = TypeVar("BodyT", bound=Body)


def reject_extra(body: Body, where: str) -> None:
    """Raise ApiError if a body has an unknown field, or an unsupported field with a value that is not neutral.

    `where` is the path of the part in the request, with a dot at its end; empty for a whole body.
    """
    for name, value in (body.model_extra or {}).items():
        if name in body.ignored:
            continue
        accepted = body.neutral.get(name)
        if accepted is None:
            known = [f"{where}{field}" for field in type(body).model_fields]
            text = unknown_name("parameter", f"{where}{name}", known)
            raise invalid(text, f"{where}{name}", "unknown_parameter")
        # In Python 0 equals False and 1 equals True, in JSON they differ; 0.0 equals 0 in both.
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in accepted):
            if name == "best_of":
                raise invalid(f"{where}{name} must be 1", f"{where}{name}", "unsupported_parameter")
            raise invalid(f"{where}{name} is not supported", f"{where}{name}", "unsupported_parameter")


def _drop_unknown(value: Any) -> None:
    if isinstance(value, list):
        for one in value if value and isinstance(value[0], Body) else ():
            _drop_unknown(one)
    elif isinstance(value, Body):
        extra = value.model_extra or {}
        for name in extra.keys() - value.ignored - value.neutral.keys():
            del extra[name]
        for part in value.__dict__.values():
            _drop_unknown(part)


def describe_non_empty(schema: dict[str, Any]) -> None:
    """Add to the JSON schema of a prompt that neither its text, its list nor a part of the list is empty."""
    limit = {"string": "minLength", "array": "minItems"}.get(schema.get("type", ""))
    if limit is not None:
        schema[limit] = 1
    for nested in (*schema.get("anyOf", []), *([schema["items"]] if "items" in schema else [])):
        describe_non_empty(nested)


def at_most(count: int) -> BeforeValidator:
    """Return a validator that rejects a JSON object with more than `count` members before these are validated.

    So a large object cannot cause one error per invalid member. Lists need no such validator: pydantic checks
    `max_length` first, and `fail_fast` stops at the first error.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"it has {len(value)} members, the limit is {count}")
        return value

    return BeforeValidator(check)


def parse(kind: type[BodyT], raw: bytes, *, ignores_unknown: bool = False) -> BodyT:
    """Return the body of a request. Raises ApiError (400), which names the first invalid field.

    `ignores_unknown` drops unknown fields. Unsupported fields that are known still raise ApiError.
    """
    context = IGNORES_UNKNOWN if ignores_unknown else None
    try:
        return _sized(kind.model_validate_json(raw, context=context), raw)
    except ValidationError as failure:
        if (rewritten := _with_integers(raw, failure)) is None:
            raise _first_error(failure) from failure
    try:
        return _sized(kind.model_validate_json(rewritten, context=context), raw)
    except ValidationError as error:
        raise _first_error(error) from error


def _sized(body: BodyT, raw: bytes) -> BodyT:
    body.__dict__["size_bytes"] = len(raw)
    return body


def _with_integers(raw: bytes, failure: ValidationError) -> bytes | None:
    """Return the body with numbers such as 5.0 written as integers, None if no such number caused the failure.

    In JSON 5.0 is an integer, but few clients write it. So a body is rewritten at most once, after it was rejected.
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
