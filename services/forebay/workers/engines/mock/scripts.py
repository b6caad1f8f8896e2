"""Output of a mock engine that is more than words: structured output, tool calls and reasoning.

A script replaces the first words of the output, or all: a value of the structure (JSON or choices; a forced tool call
is a structure too), or for a chat reasoning if its prompt ends with `<think>`, and calls of the tools in the prompt. If
the last message is a user's, the tools are called whose names share a word with it, otherwise those whose definitions
do.

A script depends only on the prompt and the seed of the request. Tools and messages are read from the tokens of the
prompt, in the format of the default model, which is that of Qwen. An attempt that continues the output of an earlier
one gets the rest of the script. With `ignore_eos` there are no calls and no reasoning, because the client wants exactly
`max_tokens` tokens. The generated values of a script share a budget of characters, which does not depend on
`max_tokens`, because an attempt that continues an output has fewer tokens left.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor, isfinite
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.events.base import pack_u32, unpack_u32
from forebay.events.requests import StructuredOutput
from forebay.events.work import WorkItem
from forebay.workers.engines.mock.outputs import prompt_of, sampler_seed

DEPTH = 5  # deeper values contain only what the schema requires, so that recursive schemas end
DEPTH_MAX = 32  # deeper values are null, because a schema may require endless recursion
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
    """Generates a value that matches a JSON schema. Equal schemas and seeds give equal values.

    No library does that: `jsf` draws from the global random numbers of the process, fails for `allOf` and
    `prefixItems`, and has no bound on the size. Supported are `type`, `enum`, `const`, `properties`, `required`,
    `additionalProperties`, `items`, `prefixItems`, local `$ref`, `anyOf`, `oneOf`, `allOf`, bounds of numbers and
    lengths, and common values of `format`. Other keywords, such as `pattern`, have no effect. A schema comes from a
    client, so every keyword may have any value.

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

    def value(self) -> Any:
        return self._value(self._root, 0)

    def _draw(self, count: int) -> int:
        """Return a number from 0 to `count - 1`."""
        self._draws += 1
        return xxh3_64_intdigest(self._draws.to_bytes(8, "little"), self._seed) % count

    def _word(self) -> str:
        return self._words[self._draw(len(self._words))]

    def _value(self, schema: Any, depth: int) -> Any:
        if depth > DEPTH_MAX or not self._budget.charge(VALUE_CHARS):
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
                return self._multiple(schema, max(1, int(_step(schema))), 1)
            case "number":
                step = _step(schema)
                return self._multiple(schema, step, 0) if step else self._number(schema)
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
            if not self._budget.charge(len(json.dumps(name))):
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
        while len(found) < count and tries > 0 and self._budget.left:
            tries -= 1
            one = self._value(first[len(found)] if len(found) < len(first) else schema.get("items"), depth + 1)
            if one not in found or not schema.get("uniqueItems"):
                found.append(one)
        return found

    def _multiple(self, schema: dict[str, Any], step: float, margin: float) -> float:
        low, high = _bounds(schema, margin)
        first, last = ceil(low / step), floor(high / step)
        return step * (first + self._draw(max(1, int(last - first + 1))))

    def _number(self, schema: dict[str, Any]) -> float:
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


START = "<|im_start|>"
END = "<|im_end|>"
REPLY = f"{START}assistant\n"
THINK = "<think>\n"
TOOLS = "You may call one or more functions to assist with the user query."  # in a prompt with tools
REASONING_WORDS = 16
WORD_CHARS_MIN = 4
COMMON_WORDS = frozenset(
    (
        *("about", "also", "call", "each", "from", "given", "have", "into", "please", "some", "tell", "that", "them"),
        *("then", "there", "they", "this", "user", "were", "what", "when", "where", "which", "will", "with", "your"),
        # of JSON schemas
        *("additional", "array", "boolean", "default", "description", "enum", "false", "function", "integer", "items"),
        *("name", "null", "number", "object", "parameters", "properties", "required", "schema", "strict", "string"),
        *("title", "true", "type", "value"),
    )
)
NAME_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
ANY_OBJECT = {"properties": {"answer": {"type": "string", "minLength": 20}}}


class Script(NamedTuple):
    """Beginning of the output of one attempt.

    Attributes:
        token_ids: the tokens; empty if earlier attempts generated all of them.
        is_whole: whether the output ends after them; otherwise words follow.
    """

    token_ids: list[int]
    is_whole: bool


class OutputScripts:
    """Writes scripts for the tokenizer of one model.

    Args:
        encode: returns the tokens of a text.
        decode: returns the text of tokens, including special tokens.
        words: words of generated strings; at least one.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
        words: Sequence[str],
    ) -> None:
        self._encode = encode
        self._decode = decode
        self._words = words
        self._reply = pack_u32(encode(REPLY))
        self._think = pack_u32(encode(REPLY + THINK))
        self._tools = pack_u32(encode(TOOLS)[1:-1])  # the first and last token may depend on the text around them

    def script(self, item: WorkItem) -> Script | None:
        """Return the script of an attempt, after the output of earlier attempts; None if the output is only words."""
        sampling = item.sampling
        if item.task != "generate":
            return None
        prompt = prompt_of(item)
        seed = xxh3_64_intdigest(prompt, sampler_seed(item.request_id, sampling))
        if sampling.structured is not None:
            text, is_whole = self._structured(sampling.structured, seed), True
        elif sampling.ignore_eos:
            return None
        else:
            text, is_whole = self._chat(prompt, seed)
        return None if text is None else Script(self._encode(text)[item.output_tokens :], is_whole)

    def _chat(self, prompt: bytes, seed: int) -> tuple[str | None, bool]:
        """Return the reasoning and calls of a chat, None without either, and whether the output ends after them."""
        is_thinking = prompt.endswith(self._think)
        if not is_thinking and not prompt.endswith(self._reply):
            return None, False
        calls = list(self._calls(prompt, seed)) if self._tools in prompt else []
        if not calls and not is_thinking:
            return None, False
        reasoning = f"{self._reasoning(seed)}\n</think>\n\n" if is_thinking else ""
        return reasoning + "\n".join(calls), bool(calls)

    def _structured(self, structure: StructuredOutput, seed: int) -> str | None:
        match structure.kind:
            case "json_schema":
                return self._json(_decoded(structure.text), seed, CharBudget())
            case "json_object":
                return self._json(ANY_OBJECT, seed, CharBudget())
            case "choice":
                choices = _decoded(structure.text)
                return str(choices[seed % len(choices)])[:CHARS_MAX] if isinstance(choices, list) and choices else None
            case _:
                return None

    def _json(self, schema: Any, seed: int, budget: CharBudget) -> str:
        return json.dumps(SchemaValues(schema, seed, self._words, budget).value(), ensure_ascii=False)

    def _reasoning(self, seed: int) -> str:
        schema = {"items": {}, "minItems": REASONING_WORDS}
        return " ".join(SchemaValues(schema, seed, self._words, CharBudget()).value())

    def _calls(self, prompt: bytes, seed: int) -> Iterator[str]:
        """Yield a call of each tool that the last message mentions, in the format of Hermes and Qwen.

        The calls share one budget. When it is used up, no tool is called any more.
        """
        text = self._decode(unpack_u32(prompt))
        *_, message, _ = ("", *text.split(START))
        role, _, content = message.removesuffix("\n").removesuffix(END).partition("\n")
        if role != "user":
            return
        spoken = re.findall(r"[a-z]+", content.lower())
        budget = CharBudget()
        tools = list(_tools(text))
        called = [tool for tool in tools if _is_mentioned(tool["name"], spoken)]
        for number, tool in enumerate(called or [tool for tool in tools if _is_mentioned(json.dumps(tool), spoken)]):
            schema = tool.get("parameters") or {"type": "object"}
            arguments = self._json(schema, seed + number, budget)
            yield f'<tool_call>\n{{"name": {json.dumps(tool["name"])}, "arguments": {arguments}}}\n</tool_call>'
            if not budget.left:
                return


def _is_mentioned(text: str, spoken: Sequence[str]) -> bool:
    """Return whether one of the spoken words begins with a word of a text, such as `orders` with `order`."""
    found = {word.lower() for word in NAME_WORD.findall(text)} - COMMON_WORDS
    keys = tuple(word for word in found if len(word) >= WORD_CHARS_MIN)
    return any(word.startswith(keys) for word in spoken)


def _decoded(text: str) -> Any:
    """Return decoded JSON; None if it is invalid, because the log may contain anything."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _tools(text: str) -> Iterator[dict[str, Any]]:
    """Yield the functions in a prompt: one JSON object per line between the tags `<tools>`."""
    for line in text.partition("\n<tools>\n")[2].partition("\n</tools>")[0].split("\n"):
        try:
            function = msgspec.json.decode(line)["function"]
        except (msgspec.DecodeError, KeyError, TypeError):
            continue
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function
