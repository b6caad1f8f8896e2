"""Formats of tool calls and reasoning: one row per model family, and the choice of a row by the model card.

The names are those of vLLM's options. The formats are those of the chat templates and model cards that the families
publish.
"""

import re
from collections.abc import Iterable, Mapping

import msgspec

from forebay.ingress.parsers.bodies import BracesBody, JsonBody, ParameterBody, ParameterTags, PythonBody
from forebay.ingress.parsers.parsers import ReasoningFormat
from forebay.ingress.parsers.tool_calls import CallFormat

QWEN_TAGS = ParameterTags(
    begin="<parameter=",
    key="(?P<key>.*)",
    key_end=">",
    value_end="</parameter>",
    end=("</function>",),
    kept=("</tool_call>",),
    has_newlines=True,
)
GLM_TAGS = ParameterTags(
    begin="<arg_key>",
    key="(?P<key>.*)",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    end=(),
    kept=("</tool_call>",),
)
MINIMAX_TAGS = ParameterTags(
    begin="<parameter name=",
    key=r"\s*[\"']?(?P<key>.*?)[\"']?\s*",
    key_end=">",
    value_end="</parameter>",
    end=("</invoke>",),
    kept=("</minimax:tool_call>",),
)
DSML = "｜DSML｜"
DEEPSEEK_CLOSE = "<｜tool▁call▁end｜>"
DEEPSEEK_V31 = CallFormat(
    begin=("<｜tool▁calls▁begin｜>",),
    end=("<｜tool▁calls▁end｜>",),
    open="<｜tool▁call▁begin｜>",
    head_end=("<｜tool▁sep｜>",),
    close=(DEEPSEEK_CLOSE,),
    body=lambda name, _: JsonBody(name, (DEEPSEEK_CLOSE,)),
    ends_reasoning=True,
)
KIMI_CLOSE = "<|tool_call_end|>"
INVOKED = re.compile(r"\s*[\"']?(?P<name>[^\"'\s]+)[\"']?\s*")
HERMES = CallFormat(begin=("<tool_call>",), end=("</tool_call>",), has_objects=True)
LLAMA = CallFormat(begin=("<|python_tag|>",), has_objects=True, is_first=True, is_known=True)


def _dsml(block: str, space: str = "") -> CallFormat:
    mark = DSML + space
    tags = ParameterTags(
        begin=f"<{mark}parameter",
        key=r'\s*name="(?P<key>.*?)"(?:\s+string="(?P<is_string>.*?)")?\s*',
        key_end=">",
        value_end=f"</{mark}parameter>",
        end=(f"</{mark}invoke>",),
        kept=(f"</{mark}{block}>",),
    )
    return CallFormat(
        begin=(f"<{mark}{block}>",),
        end=(f"</{mark}{block}>",),
        open=f"<{mark}invoke name=",
        head=INVOKED,
        head_end=(">",),
        body=lambda name, schema: ParameterBody(name, tags, schema),
        tokens=(DSML, *tags.texts),
        ends_reasoning=True,
    )


def _gemma(begin: str, end: str, quote: str) -> CallFormat:
    return CallFormat(
        begin=(begin,),
        end=(end,),
        open="call:",
        head_end=("{",),
        keeps_head_end=True,
        body=lambda name, schema: BracesBody(name, quote, schema),
        tokens=(quote,),
        ends_reasoning=True,
    )


CALL_FORMATS: Mapping[str, CallFormat] = {
    "deepseek_v3": msgspec.structs.replace(
        DEEPSEEK_V31,
        head=re.compile(r"\s*(?:function)?<｜tool▁sep｜>\s*(?P<name>\S+)\s*"),
        head_end=("```json",),
        close=("```", DEEPSEEK_CLOSE),
        tokens=("<｜tool▁sep｜>",),
    ),
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "glm45": CallFormat(
        begin=("<tool_call>",),
        end=("</tool_call>",),
        open="",
        head_end=("<arg_key>", "</tool_call>"),
        keeps_head_end=True,
        body=lambda name, schema: ParameterBody(name, GLM_TAGS, schema),
        tokens=GLM_TAGS.texts,
        ends_reasoning=True,
    ),
    "granite": CallFormat(
        begin=("<|tool_call|>", "<tool_call>"), end=("</tool_call>",), has_objects=True, has_list=True
    ),
    "hermes": HERMES,
    "kimi_k2": CallFormat(
        begin=("<|tool_calls_section_begin|>",),
        end=("<|tool_calls_section_end|>",),
        open="<|tool_call_begin|>",
        head=re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?)\s*"),
        head_end=("<|tool_call_argument_begin|>",),
        close=(KIMI_CLOSE,),
        body=lambda name, _: JsonBody(name, (KIMI_CLOSE,)),
        ends_reasoning=True,
    ),
    "llama3_json": LLAMA,
    "llama4_pythonic": CallFormat(
        begin=("<|python_start|>",),
        end=("<|python_end|>",),
        open="",
        head_end=("(",),
        body=lambda name, _: PythonBody(name),
        has_objects=True,
        has_list=True,
        is_listed=True,
        is_first=True,
        is_known=True,
    ),
    "minimax": CallFormat(begin=("<tool_calls>",), end=("</tool_calls>",), has_objects=True),
    "minimax_m2": CallFormat(
        begin=("<minimax:tool_call>",),
        end=("</minimax:tool_call>",),
        open="<invoke name=",
        head=INVOKED,
        head_end=(">",),
        body=lambda name, schema: ParameterBody(name, MINIMAX_TAGS, schema),
        tokens=MINIMAX_TAGS.texts,
        ends_reasoning=True,
    ),
    "mistral": CallFormat(
        begin=("[TOOL_CALLS]",),
        open="",
        head=re.compile(r"\s*(?P<name>[^\s\[]+)(?:\[CALL_ID\]\S*?)?(?:\[ARGS\])?\s*"),
        head_end=("{",),
        keeps_head_end=True,
        body=lambda name, _: JsonBody(name, ()),
        tokens=("[ARGS]", "[CALL_ID]"),
        has_objects=True,
        has_list=True,
    ),
    "phi4_mini_json": CallFormat(
        begin=("functools", "<|tool_call|>"), end=("<|/tool_call|>",), has_objects=True, has_list=True
    ),
    "qwen3_coder": CallFormat(
        begin=("<tool_call>", "<function="),
        end=("</tool_call>",),
        open="<function=",
        head_end=(">",),
        body=lambda name, schema: ParameterBody(name, QWEN_TAGS, schema),
        tokens=QWEN_TAGS.texts,
        ends_reasoning=True,
    ),
}
CALL_ALIASES = {
    "glm47": "glm45",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "pythonic": "llama4_pythonic",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
}
THINK = ReasoningFormat(("<think>",), "</think>")
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": msgspec.structs.replace(THINK, is_implicit=True),
    "gemma4": ReasoningFormat(("<|channel>thought\n", "<|channel>"), "<channel|>", tokens=("<|channel>",)),
    "granite": ReasoningFormat(("Here is my thought process:", "Here's my thought process:"), "Here is my response:"),
    "mistral": ReasoningFormat(("[THINK]",), "[/THINK]"),
    "qwen3": THINK,
}
REASONING_ALIASES = dict.fromkeys(
    ("deepseek_v3", "deepseek_v4", "deepseek_v41", "glm45", "glm47", "kimi_k2", "minimax_m2"), "qwen3"
)
HARMONY, HARMONY_REASONING = "openai", "openai_gptoss"  # one parser for both, which is no row


class Signature(msgspec.Struct, frozen=True):
    """What shows that a model has a format: all of some texts in its chat template, or its type in config.json.

    Attributes:
        name: name of the parser; empty for a format that forebay has no parser for.
        texts: a signature with more texts has priority over one with a part of them.
        types: values of `model_type`. They count if no text is found, or texts of several formats.
    """

    name: str
    texts: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()


def _signature(name: str, texts: Iterable[str] = (), types: str = "") -> Signature:
    return Signature(name, frozenset(texts), frozenset(types.split()))


CALL_SIGNATURES = (
    _signature("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    _signature("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    _signature("deepseek_v32", (DSML, "function_calls"), "deepseek_v32"),
    _signature("deepseek_v4", (DSML,), "deepseek_v4"),
    _signature("deepseek_v41", (DSML, " calls>")),
    _signature("functiongemma", ("<start_function_call>",)),
    _signature("gemma4", ("<|tool_call>",), "gemma4"),
    _signature("glm45", ("<tool_call>", "<arg_key>"), "glm4_moe glm4_moe_lite glm_moe_dsa"),
    _signature("granite", ("<|tool_call|>",)),
    _signature("hermes", ("<tool_call>",)),
    _signature("kimi_k2", ("<|tool_calls_section_begin|>",), "kimi_k2"),
    _signature("llama3_json", ("<|python_tag|>",)),
    _signature("llama3_json", ("<|start_header_id|>", '{"name": function name, "parameters":')),
    _signature("llama4_pythonic", ("<|python_start|>",), "llama4"),
    _signature("llama4_pythonic", ("[func_name1(",), "llama4"),
    _signature("minimax", ("<tool_calls>", "<beginning_of_sentence>"), "minimax minimax_m1 minimax_text_01"),
    _signature("minimax_m2", ("<minimax:tool_call>",), "minimax_m2"),
    _signature("mistral", ("[TOOL_CALLS]",)),
    _signature(HARMONY, ("<|channel|>", "<|message|>"), "gpt_oss"),
    _signature("phi4_mini_json", ("<|tool|>", "<|/tool|>"), "phi4mm"),
    _signature("phi4_mini_json", ("functools[",)),
    _signature("qwen3_coder", ("<tool_call>", "<function=")),
    # Formats without a parser, whose templates contain the text of another one
    _signature("", ("<tool_call>", "]<]minimax[>[")),
    _signature("", ("<tool_call>", "<tool_calls>")),
    _signature("", ("<tool_call>", "<tool_sep>")),
    _signature("", ("<|python_tag|>", "<function=")),
)
REASONING_SIGNATURES = (
    _signature("gemma4", ("<|channel>",), "gemma4"),
    _signature("granite", ("Here is my thought process",)),
    _signature("mistral", ("[/THINK]",)),
    _signature(HARMONY_REASONING, ("<|channel|>", "<|message|>"), "gpt_oss"),
    _signature("qwen3", ("</think>",), "minimax_m2 deepseek_v32 deepseek_v4"),
)


def select(signatures: Iterable[Signature], template: str, types: frozenset[str]) -> frozenset[str]:
    """Return the names of the parsers that fit a model: one, several if its card is ambiguous, or none."""
    found = [one for one in signatures if one.texts and all(text in template for text in one.texts)]
    found = [one for one in found if not any(one.texts < other.texts for other in found)]
    if not found:
        return frozenset(one.name for one in signatures if one.types & types)
    names = frozenset(one.name for one in found)
    typed = frozenset(one.name for one in found if one.types & types)
    return typed if len(names) > 1 and len(typed) == 1 else names
