"""Base of request bodies: known fields are typed, and unknown fields are rejected by name.

An unsupported field is accepted if its value has no effect, for example `n: 1`.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import isfinite
from typing import Any, ClassVar, Self, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from forebay.events.names import unknown_name
from forebay.ingress.errors import ApiError, invalid

IGNORES_UNKNOWN = {"unknown": "ignore"}  # context of pydantic's validation
Neutral = Mapping[str, tuple[Any, ...]]  # unsupported fields, with the values that have no effect
Step = int | str
SCALARS = frozenset({"str", "int", "float", "bool"})  # members of unions in the locations of pydantic's errors
NOT_FINITE = "Input should be a finite number"


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


def optional(description: str) -> Any:
    """Return the default of an optional field that has this description in OpenAPI and in the page of its API."""
    return Field(default=None, description=description)


BodyT = TypeVar("BodyT", bound=Body)


def reject_extra(body: Body, where: str) -> None:
    """Raise ApiError if a body has an unknown field, or an unsupported field with a value that is not neutral.

    `where` is the path of the part in the request, with a dot at its end; empty for a whole body.
    """
    for name, value in (body.model_extra or {}).items():
        if name in body.ignored:
            if steps := _non_finite({name: value}):
                raise invalid(f"{where}{_path(steps)}: {NOT_FINITE}", where + _path(steps))
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


def require_fields(body: Body, where: str, kind: str, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Raise ApiError (400) unless a part of a body has the fields of its type `kind`, and none of other types.

    `where` is the path of the part in the request.
    """
    reject_extra(body, f"{where}.")
    for name, field in type(body).model_fields.items():
        value, path = getattr(body, name), f"{where}.{field.alias or name}"
        if name in required and (value is None or value == []):
            raise invalid(f"{path} is {'missing' if value is None else 'empty'}; the type {kind} requires it", path)
        if value is not None and name not in ("type", *required, *optional):
            raise invalid(f"{path} is not allowed with the type {kind}", path)


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


def encoded_options(options: msgspec.Struct) -> str:
    """Return the options of a format as JSON for `Rendering.options`; empty if all have their defaults."""
    text = msgspec.json.encode(options).decode()
    return "" if text == "{}" else text


def requires(name: str, value: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object in which `name` has a value that matches, or `others` match."""
    return {"anyOf": [{"properties": {name: value}, "required": [name]}, {"properties": others}]}


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


def _require_finite(value: Any) -> Any:
    if steps := _non_finite(value):
        raise PydanticCustomError("finite_number", NOT_FINITE, {"path": steps})
    return value


FINITE = AfterValidator(_require_finite)  # of free JSON, in which pydantic accepts Infinity, NaN and 1e999


def _non_finite(value: dict[str, Any] | list[Any]) -> tuple[Step, ...]:
    """Return the path of a number that is not finite, empty if all numbers are finite."""
    for step, part in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(part, float):
            if not isfinite(part):
                return (step,)
        elif isinstance(part, (dict, list)) and (path := _non_finite(part)):
            return (step, *path)
    return ()


def parse(kind: type[BodyT], raw: bytes, *, ignores_unknown: bool = False) -> BodyT:
    """Return the body of a request. Raises ApiError (400), which names the first invalid field.

    `ignores_unknown` drops unknown fields. Unsupported fields that are known still raise ApiError.
    """
    context = IGNORES_UNKNOWN if ignores_unknown else None
    try:
        return _sized(kind.model_validate_json(raw, context=context), raw)
    except ValidationError as failure:
        if (rewritten := _with_integers(raw, failure)) is None:
            raise _first_error(failure, raw) from failure
    try:
        return _sized(kind.model_validate_json(rewritten, context=context), raw)
    except ValidationError as error:
        raise _first_error(error, raw) from error


def _sized(body: BodyT, raw: bytes) -> BodyT:
    body.__dict__["size_bytes"] = len(raw)
    return body


def _with_integers(raw: bytes, failure: ValidationError) -> bytes | None:
    """Return the body with numbers such as 5.0 written as integers, None if no such number caused the failure.

    In JSON 5.0 is an integer, but few clients write it. So a body is rewritten at most once, after it was rejected.
    """
    errors = failure.errors(include_url=False, include_context=False, include_input=False)
    if not any(one["type"] == "int_type" for one in errors):
        return None
    try:
        return json.dumps(json.loads(raw, parse_float=_integral)).encode()
    except (ValueError, RecursionError):
        return None


def _integral(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _first_error(failure: ValidationError, raw: bytes) -> ApiError:
    errors = failure.errors(include_url=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        problem = "it is not encoded as UTF-8" if 0 in raw[:4] else errors[0]["msg"]
        return invalid(f"the body is not valid JSON: {problem}", code="invalid_json")
    found = [(_steps(one), one["msg"]) for one in _fitting(errors)]
    equal = takewhile(lambda steps: len({*steps}) == 1, zip(*(steps for steps, _ in found), strict=True))
    where = _path([step for step, *_ in equal])
    texts = [text if _path(steps) == where else f"{_path(steps)}: {text}" for steps, text in found]
    first, *others = dict.fromkeys(texts)
    text = " or ".join([first, *(one.removeprefix("Input should be ") for one in others)])
    return invalid(f"{where or 'the body'}: {text}", where or None)


def _fitting(errors: Sequence[ErrorDetails], begin: int = 0) -> list[ErrorDetails]:
    """Return the first error. If it is about a union, return an error of each member that fits best.

    Pydantic reports errors of every member, with the member in the location. Steps before `begin` are equal.
    """
    location = errors[0]["loc"]
    at = next((at for at in range(begin, len(location)) if _is_member(location[at])), None)
    if at is None:
        return [errors[0]]
    members: dict[Step, list[ErrorDetails]] = {}
    for one in errors:
        if one["loc"][:at] == location[:at] and len(one["loc"]) > at:
            members.setdefault(one["loc"][at], []).append(one)
    found = [one for member in members.values() for one in _fitting(member, at + 1)]
    best = max(map(_rank, found))
    return [one for one in found if _rank(one) == best]


def _rank(error: ErrorDetails) -> tuple[bool, int, int]:
    """Return how well a union member fits: its type does, its error is deep in the value, or far into a list."""
    steps, kind = _steps(error), error["type"]
    index = steps[-1] if steps and isinstance(steps[-1], int) else 0
    return not kind.endswith(("_type", "literal_error")), len(steps), index if index > 1 else 0


def _is_member(step: Step) -> bool:
    """Return whether a step of a location is a member of a union. Parameters have names in lower case, or numbers."""
    if not isinstance(step, str) or step.isdigit():
        return False
    return not step.isidentifier() or step in SCALARS or step[0].isupper()


def _steps(error: ErrorDetails) -> tuple[Step, ...]:
    return (*(step for step in error["loc"] if not _is_member(step)), *error.get("ctx", {}).get("path", ()))


def _path(steps: Sequence[Step]) -> str:
    """Return a path such as `messages[0].content`."""
    return "".join(f".{step}" if str(step).isidentifier() else f"[{step!r}]" for step in steps).removeprefix(".")
