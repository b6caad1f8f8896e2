"""Output of a mock engine: seeds, log probabilities and embeddings from hashes, and scripts for more than words.

A script replaces the first words of the output, or all: a value of the structure (JSON or choices; a forced tool call
is a structure too), or for a chat reasoning if its prompt ends with `<think>`, and calls of the tools in the prompt. If
the last message is a user's, the tools are called whose names share a word with it, otherwise those whose
definitions do. If it is the result of a tool, the output ends after a few words.

A script depends only on the prompt and the seed of the request. Tools and messages are read from the tokens of the
prompt, in the format of the default model, which is that of Qwen. An attempt that continues the output of an earlier
one gets the rest of the script. With `ignore_eos` there are no calls and no reasoning, because the client wants exactly
`max_tokens` tokens. The generated values of a script share a budget of characters, which does not depend on
`max_tokens`, because an attempt that continues an output has fewer tokens left.
"""

import json
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor, isfinite, sqrt
from typing import Any, NamedTuple, TypeVar

import msgspec
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from forebay.engine_model.model import Emitted, EngineStep, Finished
from forebay.events.base import U32_BYTES, U64_MASK, pack_u32, unpack_u32
from forebay.events.requests import Sampling, StructuredOutput, Task
from forebay.events.tokens import TokenLogprob, TopLogprob
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineBatch, Vector

TASKS: tuple[Task, ...] = ("generate", "embed")
DIMENSIONS = 64
HALF = 1 << 63


class Extra(NamedTuple):
    """What the output of a request has besides tokens of the model.

    Attributes:
        is_ended: whether the output ends by itself, and not because of `max_tokens`.
        is_empty: whether there is no output. The token that the model generates is then removed.
    """

    item: WorkItem
    is_ended: bool
    is_empty: bool

    def finished(self, end: Finished) -> Finished:
        if not (self.is_ended or self.is_empty):
            return end
        return msgspec.structs.replace(end, reason="stop", output_tokens=0 if self.is_empty else end.output_tokens)

    def emitted(self, chunk: Emitted, vocabulary: Sequence[int]) -> Emitted:
        """Return a chunk with the log probabilities of its tokens and of as many most likely ones as requested.

        The most likely token is the token itself, then others of the vocabulary follow.
        """
        if (count := self.item.sampling.logprobs) is None:
            return chunk
        logprobs = []
        for token_id in unpack_u32(chunk.token_ids):
            likeliest = [token_id, *(other for other in vocabulary[:count] if other != token_id)][:count]
            top = tuple(TopLogprob(token_id=other, logprob=-0.7 * (at + 1)) for at, other in enumerate(likeliest))
            logprobs.append(TokenLogprob(logprob=-0.7, top=top))
        return msgspec.structs.replace(chunk, logprobs=tuple(logprobs))


def extend(batch: EngineBatch, extras: dict[str, Extra], vocabulary: Sequence[int]) -> EngineBatch:
    """Return a batch with the requested log probabilities and embeddings, and the finish reason of whole scripts.

    A request without output takes as long as its prompt. The extras of finished requests are removed. The vocabulary
    has the tokens that may be reported as alternatives.
    """
    if not extras:
        return batch
    empty = {request_id for request_id, extra in extras.items() if extra.is_empty}
    ended = [(end, extras.get(end.request_id)) for end in batch.finished]
    extended = msgspec.structs.replace(
        batch,
        emitted=[
            extras[chunk.request_id].emitted(chunk, vocabulary) if chunk.request_id in extras else chunk
            for chunk in batch.emitted
            if chunk.request_id not in empty
        ],
        first_tokens=[first for first in batch.first_tokens if first.request_id not in empty],
        finished=[end if extra is None else extra.finished(end) for end, extra in ended],
        vectors=[
            Vector(end.request_id, end.attempt, vector_of(prompt_of(extra.item)))
            for end, extra in ended
            if extra is not None and extra.item.task == "embed"
        ],
    )
    for end in batch.finished:
        extras.pop(end.request_id, None)
    return extended


def sampler_seed(request_id: str, sampling: Sampling) -> int:
    """Return the 64-bit seed of the output of a request: 0 at temperature 0, otherwise the seed of the client.

    Without either, the seed is a hash of the request id. So the choices of a request differ, and equal requests too, as
    on a real engine. Every attempt and stage of a request has the same seed.
    """
    if sampling.temperature == 0:
        return 0
    return xxh3_64_intdigest(request_id.encode()) if sampling.seed is None else sampling.seed & U64_MASK


def prompt_of(item: WorkItem) -> bytes:
    """Return the prompt tokens of a request, without the output of earlier attempts, as packed u32."""
    return item.token_ids[: len(item.token_ids) - item.output_tokens * U32_BYTES]


def vector_of(token_ids: bytes) -> bytes:
    """Return a vector of length 1 that is derived from the tokens of a prompt, packed as little-endian float32."""
    seed = xxh3_64_digest(token_ids)
    values = [xxh3_64_intdigest(seed, at) / HALF - 1.0 for at in range(DIMENSIONS)]
    length = sqrt(sum(value * value for value in values))
    return array("f", [value / length for value in values]).tobytes()


def token_seed(item: WorkItem, seen: int) -> int:
    """Return the seed of the output tokens, which is equal for every attempt and stage of a request.

    `seen` is the hash of its images and videos; another number if its KV has a wrong byte.
    """
    return xxh3_64_intdigest(prompt_of(item), (sampler_seed(item.request_id, item.sampling) + seen) & U64_MASK)


def merged(steps: Sequence[EngineStep]) -> list[Emitted]:
    """Return one chunk per request, ordered by their first token."""
    chunks: dict[str, list[Emitted]] = {}
    for step in steps:
        for chunk in step.emitted:
            chunks.setdefault(chunk.request_id, []).append(chunk)
    return [
        msgspec.structs.replace(parts[0], token_ids=b"".join([part.token_ids for part in parts]))
        for parts in chunks.values()
    ]


T = TypeVar("T", list[Any], dict[str, Any])

DEPTH = 5  # deeper values contain only what the schema requires, so that recursive schemas end
DEPTH_MAX = 32  # deeper values are null, because a schema may require endless recursion
CHARS_MAX = 20_000  # of all values of a script, because generating and tokenizing them blocks the event loop
VALUE_CHARS = 8  # charged per value, for its punctuation and the time to generate it
ITEMS = 2  # of an array, unless the schema sets a minimum
NUMBER_SPAN = 100
STEP_MIN = 1e-6
FORMATS: dict[str, str] = {
    "date": "2026-05-17",
    "time": "09:30:00Z",
    "date-time": "2026-05-17T09:30:00Z",
    "duration": "PT90M",
    "email": "{word}@example.com",
    "hostname": "{word}.example.com",
    "ipv4": "192.0.2.7",
    "ipv6": "2001:db8::7",
    "uri": "https://example.com/{word}",
    "uuid": "6f1c1f3e-2b1d-4c57-9a57-0c8f3d1e7a42",
}


class SchemaValues:
    """Generates values that match JSON schemas. Equal schemas and seeds give equal values.

    No library does that: `jsf` draws from the global random numbers of the process, fails for `allOf` and
    `prefixItems`, and has no bound on the size. Supported are `type`, `enum`, `const`, `properties`, `required`,
    `additionalProperties`, `items`, `prefixItems`, local `$ref`, `anyOf`, `oneOf`, bounds of numbers and lengths, and
    common values of `format`. Other keywords, such as `pattern`, have no effect. A schema comes from a client, so every
    keyword may have any value.

    Attributes:
        left: JSON characters that may still be generated. When they are used up, a value ends, and need not match.
    """

    def __init__(self, seed: int, words: Sequence[str]) -> None:
        self.left = CHARS_MAX
        self._seed = seed
        self._words = words
        self._draws = 0
        self._root: Any = None  # the schema that local references refer to

    def value(self, schema: Any) -> Any:
        self._root = schema
        return self._value(schema, 0)

    def _charge(self, chars: int) -> bool:
        """Subtract a number of characters. Return whether they were left; if not, none is left."""
        is_enough = chars <= self.left
        self.left = self.left - chars if is_enough else 0
        return is_enough

    def _draw(self, count: int) -> int:
        self._draws += 1
        return xxh3_64_intdigest(self._draws.to_bytes(8, "little"), self._seed) % count

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self._draw(len(options))]

    def _value(self, schema: Any, depth: int) -> Any:
        if depth > DEPTH_MAX or not self._charge(VALUE_CHARS):
            return None
        schema = schema if isinstance(schema, dict) else {}
        if isinstance(reference := schema.get("$ref"), str):
            return self._value(self._resolve(reference), depth + 1) if self._charge(len(reference)) else None
        if literals := [schema["const"]] if "const" in schema else _get(schema, "enum", list):
            literal = self.pick(literals)
            return literal if self._charge(len(json.dumps(literal))) else None
        if options := _get(schema, "anyOf", list) or _get(schema, "oneOf", list):
            return self._value(self._option(options, depth), depth + 1)
        match self._type(schema, depth):
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "integer" | "number" as kind:
                return self._numeric(schema, is_integer=kind == "integer")
            case "boolean":
                return bool(self._draw(2))
            case "null":
                return None
            case _:
                return self._string(schema)

    def _resolve(self, reference: str) -> Any:
        """Return the schema at a JSON pointer into the root schema; None if there is none."""
        found = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and len(name) < 9 and int(name) < len(found):
                found = found[int(name)]
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found

    def _target(self, schema: Any) -> dict[str, Any]:
        if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
            schema = self._resolve(reference)
        return schema if isinstance(schema, dict) else {}

    def _option(self, options: list[Any], depth: int) -> Any:
        """Return one of several schemas: any that is not null, but for a deep value the shortest, such as null."""
        if depth >= DEPTH:
            return min(options, key=lambda one: len(json.dumps(self._target(one))))
        return self.pick([one for one in options if self._target(one).get("type") != "null"] or options)

    def _type(self, schema: dict[str, Any], depth: int) -> str:
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            kinds = [one for one in kind if one != "null"] or kind
            kind = "null" if depth >= DEPTH and "null" in kind else self.pick(kinds)
        if isinstance(kind, str):
            return kind
        return "object" if "properties" in schema else "array" if "items" in schema else "string"

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = _get(schema, "properties", dict)
        required = [name for name in _get(schema, "required", list) if isinstance(name, str)]
        found = {}
        for name in dict.fromkeys([*required, *properties] if depth < DEPTH else required):
            if not self._charge(len(json.dumps(name))):
                break
            found[name] = self._value(properties.get(name), depth + 1)
        more = schema.get("additionalProperties")
        if not found and depth < DEPTH and isinstance(more, dict):
            found[self.pick(self._words)] = self._value(more, depth + 1)
        return found

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        first = _get(schema, "prefixItems", list)
        count = int(_number(schema, "minItems") or 0) or (len(first) or ITEMS if depth < DEPTH else 0)
        if (most := _number(schema, "maxItems")) is not None:
            count = min(count, int(most))
        found: list[Any] = []
        while len(found) < count and self.left:
            found.append(self._value(first[len(found)] if len(found) < len(first) else schema.get("items"), depth + 1))
        return found

    def _numeric(self, schema: dict[str, Any], *, is_integer: bool) -> float:
        low, high = _number(schema, "minimum"), _number(schema, "maximum")
        if (above := _number(schema, "exclusiveMinimum")) is not None:
            low = above + is_integer
        if (below := _number(schema, "exclusiveMaximum")) is not None:
            high = below - is_integer
        if low is None:
            low = 0.0 if high is None or high > 0 else high - NUMBER_SPAN
        high = max(low, low + NUMBER_SPAN if high is None else high)
        step = _number(schema, "multipleOf") or 0
        step = max(1, int(step)) if is_integer else step
        if step >= STEP_MIN:
            first, last = ceil(low / step), floor(high / step)
            return step * (first + self._draw(max(1, last - first + 1)))
        value = low + (high - low) * (self._draw(NUMBER_SPAN - 1) + 1) / NUMBER_SPAN
        return round(value, 2) if low < round(value, 2) < high else value

    def _string(self, schema: dict[str, Any]) -> str:
        text: str = self.pick(self._words)
        if isinstance(name := schema.get("format"), str) and name in FORMATS:
            return FORMATS[name].format(word=text)
        least = min(self.left, int(_number(schema, "minLength") or 0))
        while len(text) < least:
            text += f" {self.pick(self._words)}"
        most = _number(schema, "maxLength")
        text = text if most is None else text[: max(least, int(most))]
        self._charge(len(text))
        return text


def _get(schema: dict[str, Any], name: str, kind: type[T]) -> T:
    """Return the value of a keyword; an empty one if it has another type."""
    value = schema.get(name)
    return value if isinstance(value, kind) else kind()


def _number(schema: dict[str, Any], name: str) -> float | None:
    value = schema.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and abs(value) < 1e15
    return value if is_number else None


START = "<|im_start|>"
END = "<|im_end|>"
REPLY = f"{START}assistant\n"
THINK = "<think>\n"
TOOLS = "You may call one or more functions to assist with the user query."  # in a prompt with tools
FEW_WORDS = {"items": {}, "minItems": 16}
WORD_CHARS_MIN = 4  # of a word that shows that a message mentions a tool
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
    """Beginning of the output of one attempt. `token_ids` are empty if earlier attempts generated all of them.

    If the script is whole, the output ends after it; otherwise words follow.
    """

    token_ids: list[int]
    is_whole: bool


class OutputScripts:
    """Writes scripts for the tokenizer of one model. Generated strings consist of `words`; at least one is needed.

    `decode` returns special tokens, too.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str], words: Sequence[str]
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
        values = SchemaValues(xxh3_64_intdigest(prompt, sampler_seed(item.request_id, sampling)), self._words)
        if sampling.structured is not None:
            text, is_whole = _structured(sampling.structured, values), True
        elif sampling.ignore_eos:
            return None
        else:
            text, is_whole = self._chat(prompt, values)
        return None if text is None else Script(self._encode(text)[item.output_tokens :], is_whole)

    def _chat(self, prompt: bytes, values: SchemaValues) -> tuple[str | None, bool]:
        """Return the reasoning and the end of a chat's output, None without either, and whether there is the end."""
        is_thinking = prompt.endswith(self._think)
        if not is_thinking and not prompt.endswith(self._reply):
            return None, False
        reasoning = f"{' '.join(values.value(FEW_WORDS))}\n</think>\n\n" if is_thinking else ""
        end = self._end(self._decode(unpack_u32(prompt)), values) if self._tools in prompt else ""
        return reasoning + end or None, bool(end)

    def _end(self, text: str, values: SchemaValues) -> str:
        """Return the calls of the tools that the last message mentions, or words if it is the result of a tool."""
        *_, message, _ = ("", *text.split(START))
        role, _, content = message.removesuffix("\n").removesuffix(END).partition("\n")
        if role == "tool":
            return str(" ".join(values.value(FEW_WORDS)))
        spoken = re.findall(r"[a-z]+", content.lower()) if role == "user" else ()
        return "\n".join(self._calls(text, spoken, values))

    def _calls(self, text: str, spoken: Sequence[str], values: SchemaValues) -> Iterator[str]:
        """Yield a call of each tool that these words mention, in the format of Hermes and Qwen."""
        tools = list(_tools(text))
        called = [tool for tool in tools if _is_mentioned(tool["name"], spoken)]
        for tool in called or [tool for tool in tools if _is_mentioned(json.dumps(tool), spoken)]:
            if values.left:
                arguments = _json(values, tool.get("parameters") or {"type": "object"})
                yield f'<tool_call>\n{{"name": {json.dumps(tool["name"])}, "arguments": {arguments}}}\n</tool_call>'


def _structured(structure: StructuredOutput, values: SchemaValues) -> str | None:
    match structure.kind:
        case "json_schema":
            return _json(values, _decoded(structure.text))
        case "json_object":
            return _json(values, ANY_OBJECT)
        case "choice":
            choices = _decoded(structure.text)
            return str(values.pick(choices))[:CHARS_MAX] if isinstance(choices, list) and choices else None
        case _:
            return None


def _json(values: SchemaValues, schema: Any) -> str:
    return json.dumps(values.value(schema), ensure_ascii=False)


def _is_mentioned(text: str, spoken: Sequence[str]) -> bool:
    """Return whether one of the spoken words begins with a word of a text, such as `orders` with `list_order`."""
    words = {word.lower() for word in NAME_WORD.findall(text) if len(word) >= WORD_CHARS_MIN}
    keys = tuple(words - COMMON_WORDS)
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
