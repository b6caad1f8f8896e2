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
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.events.base import pack_u32, unpack_u32
from forebay.events.requests import StructuredOutput
from forebay.events.work import WorkItem
from forebay.workers.engines.mock.outputs import prompt_of, sampler_seed
from forebay.workers.engines.mock.schema_values import CHARS_MAX, CharBudget, SchemaValues

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
