"""Generate a value that matches a JSON schema. Equal schemas and seeds give equal values.

Supported: `type`, `enum`, `const`, `properties`, `required`, `additionalProperties`, `items`, `prefixItems`, local
`$ref`, `anyOf`, `oneOf`, `allOf`, bounds of numbers and lengths, and common values of `format`. Other keywords, such as
`pattern` and `not`, have no effect. A schema comes from a client, so every keyword may have any value.
"""

import json
from collections.abc import Callable, Sequence
from math import ceil, floor, isfinite
from typing import Any

from xxhash import xxh3_64_intdigest

DEPTH = 5  # deeper values contain only what the schema requires, so that recursive schemas end
DEPTH_MAX = 32  # deeper values are null, because a schema may require endless recursion
VALUES_MAX = 1_000  # then all values are null, because a schema may require exponentially many
CHARS_MAX = 20_000  # of all values that share a budget, because generating and tokenizing them blocks the event loop
VALUE_CHARS = 8  # charged per value, for its punctuation and the time to generate it
ITEMS = 2  # of an array, unless the schema sets a minimum
NUMBER_SPAN = 100
STEP_MIN = 1e-6
FORMATS: dict[str, Callable[[str], str]] = {
    "date": lambda _: "2026-05-17",
    "time": lambda _: "09:30:00Z",
    "date-time": lambda _: "2026-05-17T09:30:00Z",
    "duration": lambda _: "PT90M",
    "email": lambda word: f"{word}@example.com",
    "hostname": lambda word: f"{word}.example.com",
    "ipv4": lambda _: "192.0.2.7",
    "ipv6": lambda _: "2001:db8::7",
    "uri": lambda word: f"https://example.com/{word}",
    "uuid": lambda _: "6f1c1f3e-2b1d-4c57-9a57-0c8f3d1e7a42",
}


class CharBudget:
    """Number of JSON characters that may still be generated.

    Attributes:
        left: the number of characters; 0 if the budget is used up.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = CHARS_MAX

    def charge(self, chars: int) -> bool:
        """Subtract a number of characters. Return whether the budget had them; if not, it is used up."""
        is_enough = chars <= self.left
        self.left = self.left - chars if is_enough else 0
        return is_enough


class SchemaValues:
    """Generates values for one root schema.

    Args:
        root: the schema, which local references refer to.
        budget: limits the size of the value. When it is used up, the value ends, and need not match the schema.
    """

    def __init__(self, root: Any, seed: int, words: Sequence[str], budget: CharBudget) -> None:
        self._root = root
        self._seed = seed
        self._words = words
        self._budget = budget
        self._draws = 0
        self._left = VALUES_MAX

    def value(self) -> Any:
        return self._value(self._root, 0)

    def _draw(self, count: int) -> int:
        """Return a number from 0 to `count - 1`."""
        self._draws += 1
        return xxh3_64_intdigest(self._draws.to_bytes(8, "little"), self._seed) % count

    def _word(self) -> str:
        return self._words[self._draw(len(self._words))]

    def _value(self, schema: Any, depth: int) -> Any:
        self._left -= 1
        if depth > DEPTH_MAX or self._left < 0 or not self._budget.charge(VALUE_CHARS):
            return None
        schema = schema if isinstance(schema, dict) else {}
        if isinstance(reference := schema.get("$ref"), str):
            return self._value(self._resolve(reference), depth + 1) if self._budget.charge(len(reference)) else None
        if "const" in schema:
            return self._literal(schema["const"])
        if options := _list(schema, "enum"):
            return self._literal(options[self._draw(len(options))])
        if options := _list(schema, "anyOf") or _list(schema, "oneOf"):
            return self._value(self._option(options, depth), depth + 1)
        if parts := _list(schema, "allOf"):
            return self._value(self._merged(schema, parts), depth + 1)
        return self._typed(schema, self._type(schema, depth), depth)

    def _literal(self, value: Any) -> Any:
        """Return a value of the schema; None if it is larger than the budget."""
        return value if self._budget.charge(len(json.dumps(value))) else None

    def _resolve(self, reference: str) -> Any:
        """Return the schema at a JSON pointer into the root schema; an empty schema if there is none."""
        found = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and len(name) < 9 and int(name) < len(found):
                found = found[int(name)]
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found

    def _option(self, options: list[Any], depth: int) -> Any:
        """Return one of several schemas: any that is not null, but a deep value gets the simplest."""
        if depth >= DEPTH:
            return min(options, key=lambda one: _nesting(self._target(one)))
        values = [one for one in options if self._target(one).get("type") != "null"] or options
        return values[self._draw(len(values))]

    def _target(self, schema: Any) -> dict[str, Any]:
        if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
            schema = self._resolve(reference)
        return schema if isinstance(schema, dict) else {}

    def _merged(self, schema: dict[str, Any], parts: list[Any]) -> dict[str, Any]:
        """Return one schema for all parts of an `allOf`, without the keyword itself."""
        merged: dict[str, Any] = {}
        for part in (*map(self._target, parts), {**schema, "allOf": ()}):
            properties = {**_dict(merged, "properties"), **_dict(part, "properties")}
            required = [*_list(merged, "required"), *_list(part, "required")]
            merged |= {**part, "properties": properties, "required": required}
        if not merged["properties"]:
            del merged["properties"]
        return merged

    def _type(self, schema: dict[str, Any], depth: int) -> str:
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            kinds = [one for one in kind if one != "null"] or kind
            kind = "null" if depth >= DEPTH and "null" in kind else kinds[self._draw(len(kinds))]
        if isinstance(kind, str):
            return kind
        return "object" if "properties" in schema else "array" if "items" in schema else "string"

    def _typed(self, schema: dict[str, Any], kind: str, depth: int) -> Any:
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "integer":
                return self._integer(schema)
            case "number":
                return self._number(schema)
            case "boolean":
                return bool(self._draw(2))
            case "null":
                return None
            case _:
                return self._string(schema)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = _dict(schema, "properties")
        required = [name for name in _list(schema, "required") if isinstance(name, str)]
        names = [*required, *properties] if depth < DEPTH else required
        found = {}
        for name in dict.fromkeys(names):
            if self._left <= 0 or not self._budget.charge(len(json.dumps(name))):
                break
            found[name] = self._value(properties.get(name), depth + 1)
        more = schema.get("additionalProperties")
        if not found and depth < DEPTH and isinstance(more, dict):
            found[self._word()] = self._value(more, depth + 1)
        return found

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        first = _list(schema, "prefixItems")
        least = int(_number(schema, "minItems") or 0)
        count = least or (len(first) or ITEMS if depth < DEPTH else 0)
        if (most := _number(schema, "maxItems")) is not None:
            count = min(count, int(most))
        found: list[Any] = []
        tries = count * (4 if schema.get("uniqueItems") else 1)
        while len(found) < count and tries > 0 and self._left > 0 and self._budget.left:
            tries -= 1
            one = self._value(first[len(found)] if len(found) < len(first) else schema.get("items"), depth + 1)
            if one not in found or not schema.get("uniqueItems"):
                found.append(one)
        return found

    def _integer(self, schema: dict[str, Any]) -> int:
        step = max(1, int(_step(schema)))
        low, high = _bounds(schema, 1)
        first, last = ceil(low / step), floor(high / step)
        return step * (first + self._draw(max(1, last - first + 1)))

    def _number(self, schema: dict[str, Any]) -> float:
        if step := _step(schema):
            low, high = _bounds(schema, 0)
            first, last = ceil(low / step), floor(high / step)
            return step * (first + self._draw(max(1, int(last - first + 1))))
        low, high = _bounds(schema, 0)
        value = low + (high - low) * (self._draw(NUMBER_SPAN - 1) + 1) / NUMBER_SPAN
        return round(value, 2) if low < round(value, 2) < high else value

    def _string(self, schema: dict[str, Any]) -> str:
        text = self._word()
        if isinstance(name := schema.get("format"), str) and name in FORMATS:
            return FORMATS[name](text)
        least = min(self._budget.left, int(_number(schema, "minLength") or 0))
        while len(text) < least:
            text += " " + self._word()
        most = _number(schema, "maxLength")
        text = text if most is None else text[: max(least, int(most))]
        self._budget.charge(len(text))
        return text


def _bounds(schema: dict[str, Any], margin: float) -> tuple[float, float]:
    """Return the lowest and highest number that a schema allows. `margin` is added to exclusive bounds."""
    low, high = _number(schema, "minimum"), _number(schema, "maximum")
    if (above := _number(schema, "exclusiveMinimum")) is not None:
        low = above + margin
    if (below := _number(schema, "exclusiveMaximum")) is not None:
        high = below - margin
    if low is None:
        low = 0.0 if high is None or high > 0 else high - NUMBER_SPAN
    return low, max(low, low + NUMBER_SPAN if high is None else high)


def _step(schema: dict[str, Any]) -> float:
    """Return `multipleOf`; 0 if there is none, or it is too small to matter."""
    step = _number(schema, "multipleOf") or 0
    return step if step >= STEP_MIN else 0


def _number(schema: dict[str, Any], name: str) -> float | None:
    value = schema.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and abs(value) < 1e15
    return value if is_number else None


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _dict(schema: dict[str, Any], name: str) -> dict[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, dict) else {}


def _nesting(schema: dict[str, Any]) -> int:
    """Return how deeply values of a schema are probably nested: 0 for null and literals, 3 for objects."""
    kind = schema.get("type")
    if kind == "null" or "const" in schema or "enum" in schema:
        return 0
    return {"object": 3, "array": 2}.get(kind, 1) if isinstance(kind, str) else 3
