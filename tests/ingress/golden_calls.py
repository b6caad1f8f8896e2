"""Responses with two tool calls in the published format of each model family, and a tokenizer with their tags."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from forebay.ingress.model import DEFAULT_MODEL
from forebay.ingress.openai.tools import Function, Tool, ToolSelection
from forebay.ingress.parsers.formats import CALL_FORMATS, HARMONY, HARMONY_REASONING, REASONING_FORMATS
from forebay.ingress.parsers.harmony import TOKENS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"anyOf": [{"$ref": "#/$defs/Tags"}, {"type": "null"}]},
        "metric": {"type": "boolean"},
    },
    "$defs": {"Tags": {"type": "array"}},
}
TOOLS = (
    Tool(type="function", function=Function(name="get_weather", parameters=SCHEMA)),
    Tool(type="function", function=Function(name="time")),
)
AUTO = ToolSelection(TOOLS, None, parallel=True)
ARGUMENTS = {"city": 'São "Paulo" <b>', "days": 3, "tags": ["a", {"b": None}], "metric": True}
CALLS = [("get_weather", ARGUMENTS), ("time", {})]
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
WEATHER = f'{{"name": "get_weather", "arguments": {JSON}}}'
TIME = '{"name": "time", "arguments": {}}'
LLAMA = f'{{"name": "get_weather", "parameters": {JSON}}}'
THOUGHT, CONTENT = "I think\n so.", "Let me look."
THINKING = f"<think>\n{THOUGHT}</think>\n\n"
VALUES = (("city", ARGUMENTS["city"]), ("days", "3"), ("tags", '["a", {"b": null}]'), ("metric", "true"))
PYTHON = "city='São \"Paulo\" <b>', days=3, tags=['a', {'b': None}], metric=True"


def joined(form: str) -> str:
    return "".join(form.format(key=key, value=value) for key, value in VALUES)


def dsml(block: str) -> str:
    parameters = "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(key == "city").lower()}">{value}</｜DSML｜parameter>\n'
        for key, value in VALUES
    )
    calls = "".join(
        f'<｜DSML｜invoke name="{name}">\n{text}</｜DSML｜invoke>\n'
        for name, text in (("get_weather", parameters), ("time", ""))
    )
    return f"{THINKING}{CONTENT}\n\n<｜DSML｜{block}>\n{calls}</｜DSML｜{block}>"


def gemma(begin: str, end: str, quote: str) -> str:
    city, nested = f"{quote}{ARGUMENTS['city']}{quote}", f"[{quote}a{quote},{{{quote}b{quote}:null}}]"
    first = f"call:get_weather{{city:{city},days:3,tags:{nested},metric:true}}"
    return f"{begin}{first}{end}{begin}call:time{{}}{end}"


class Golden(NamedTuple):
    """A response of two calls in the format of a family. `reasoning` names the parser, empty without reasoning."""

    tool: str
    reasoning: str
    text: str
    thought: str = THOUGHT
    content: str = CONTENT


DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
GOLDEN = [
    Golden(
        "deepseek_v3",
        "deepseek_r1",
        f"{THOUGHT}</think>{CONTENT}{DEEPSEEK_BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{JSON}"
        f"\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{{}}\n```<｜tool▁call▁end｜>"
        f"{DEEPSEEK_END}",
    ),
    Golden(
        "deepseek_v31",
        "deepseek_v3",
        f"{THINKING}{CONTENT}{DEEPSEEK_BEGIN}<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>time<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>{DEEPSEEK_END}",
    ),
    Golden("deepseek_v32", "deepseek_v3", dsml("function_calls")),
    Golden("deepseek_v4", "deepseek_v4", dsml("tool_calls")),
    Golden("deepseek_v41", "deepseek_v41", dsml("calls").replace("｜DSML｜", "｜DSML｜ ")),
    Golden("functiongemma", "", gemma("<start_function_call>", "<end_function_call>", "<escape>"), "", ""),
    Golden(
        "gemma4",
        "gemma4",
        f"<|channel>thought\n{THOUGHT}<channel|>{CONTENT}" + gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    Golden(
        "glm45",
        "glm45",
        f"{THINKING}{CONTENT}\n<tool_call>get_weather\n"
        + joined("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n")
        + "</tool_call>\n<tool_call>time\n</tool_call>",
    ),
    Golden(
        "glm47",
        "glm45",
        f"{THOUGHT}</think>{CONTENT}<tool_call>get_weather"
        + joined("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>")
        + "</tool_call><tool_call>time</tool_call>",
    ),
    Golden("granite", "", f"<|tool_call|>[{WEATHER}, {TIME}]", "", ""),
    Golden(
        "granite4",
        "granite",
        f"Here is my thought process:\n{THOUGHT}Here is my response:\n{CONTENT}\n<tool_call>\n{WEATHER}\n</tool_call>"
        f"\n<tool_call>\n{TIME}\n</tool_call>",
    ),
    Golden(
        "hermes",
        "qwen3",
        f"{THINKING}{CONTENT}\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{TIME}\n</tool_call>",
    ),
    Golden(
        "kimi_k2",
        "kimi_k2",
        f"{THINKING}{CONTENT}<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_call_begin|>functions.time:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    Golden("llama3_json", "", f"<|python_tag|>{LLAMA}; {TIME}", "", ""),
    Golden("llama4_pythonic", "", f"<|python_start|>[get_weather({PYTHON}), time()]<|python_end|>", "", ""),
    Golden("llama4_pythonic", "", f"<|python_start|><|python_end|>{LLAMA}\n{TIME}", "", ""),
    Golden("pythonic", "", f"[get_weather({PYTHON}), time()]", "", ""),
    Golden("minimax", "qwen3", f"{THINKING}{CONTENT}\n<tool_calls>\n{WEATHER}\n{TIME}\n</tool_calls>"),
    Golden(
        "minimax_m2",
        "minimax_m2",
        f'{THINKING}{CONTENT}\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        + joined('<parameter name="{key}">{value}</parameter>\n')
        + '</invoke>\n<invoke name="time">\n</invoke>\n</minimax:tool_call>',
    ),
    Golden(
        "mistral",
        "mistral",
        f"[THINK]{THOUGHT}[/THINK]{CONTENT}[TOOL_CALLS]get_weather[ARGS]{JSON}[TOOL_CALLS]time[ARGS]{{}}",
    ),
    Golden("mistral", "", f"[TOOL_CALLS][{WEATHER}, {TIME}]", "", ""),
    Golden(
        HARMONY,
        HARMONY_REASONING,
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary<|message|>{CONTENT}"
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{JSON}<|call|><|start|>assistant to=functions.time<|channel|>commentary json<|message|><|call|>",
    ),
    Golden("phi4_mini_json", "", f"functools[{WEATHER}, {TIME}]", "", ""),
    Golden("phi4_mini_json", "", f"{CONTENT}\n<|tool_call|>[{WEATHER}, {TIME}]<|/tool_call|>", ""),
    Golden(
        "qwen3_coder",
        "qwen3",
        f"{THINKING}{CONTENT}\n<tool_call>\n<function=get_weather>\n"
        + joined("<parameter={key}>\n{value}\n</parameter>\n")
        + "</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
    ),
]
MARKS = sorted(
    {
        text
        for texts in [
            *(row.texts for row in CALL_FORMATS.values()),
            *(row.texts for row in REASONING_FORMATS.values()),
        ]
        for text in texts
        if len(text) > 2 and text != "call:"
    }
    | {*TOKENS}
)


def write_marked_model(directory: Path, **tokenizer_config: Any) -> None:
    """Write a model whose tokenizer has each tag of each format that is a token of some model as a special token."""
    tokenizer = json.loads((DEFAULT_MODEL / "tokenizer.json").read_bytes())
    first = 1 + max(*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"]))
    flags = {**dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False), "special": True}
    special = [mark for mark in MARKS if mark.endswith((">", "]", "｜")) and "\n" not in mark]
    tokenizer["added_tokens"] += [{**flags, "id": first + at, "content": tag} for at, tag in enumerate(special)]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((DEFAULT_MODEL / "tokenizer_config.json").read_bytes())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | tokenizer_config))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
