"""Parsers of tool calls and reasoning: formats, invalid calls, and independence of splits."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.ingress.errors import ApiError, Unusable
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.openai.tools import NO_TOOLS, Function, Tool, ToolSelection
from forebay.ingress.parsers.composer import OutputPlan
from forebay.ingress.parsers.deltas import OutputDelta, merge_deltas
from forebay.ingress.parsers.parsers import call_ids
from forebay.ingress.parsers.selection import ParseOptions, ParserFactory

MODEL = Model(DEFAULT_MODEL)
CITY = {"city": "Paris"}
TOOLS = tuple(Tool(type="function", function=Function(name=name)) for name in ("weather", "time"))
AUTO = ToolSelection(TOOLS, None, parallel=True)
FORMATS = ("hermes", "llama3_json", "mistral")


def parse(
    pieces: Sequence[str], tool: str = "none", reasoning: str = "none", how: ParseOptions | None = None
) -> list[OutputDelta]:
    parser = ParserFactory(MODEL, tool, reasoning).parser(how or ParseOptions(AUTO), "r")
    assert parser is not None
    return [*(parser.push(piece, []) for piece in pieces), parser.finish()]


def whole(text: str, tool: str = "none", reasoning: str = "none", how: ParseOptions | None = None) -> OutputDelta:
    return merge_deltas(parse([text], tool, reasoning, how))


def calls(output: OutputDelta) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in output.calls]


ONE = [("weather", CITY)]
TWO = [("weather", CITY), ("time", {"zone": 1})]


@pytest.mark.parametrize(
    ("tool", "text", "expected", "content"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', ONE, ""),
        ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>', ONE, ""),
        ("hermes", 'Sure.\n<tool_call>{"name":"weather","arguments":{"city":"Paris"}}</tool_call>', ONE, "Sure."),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>\n'
            '<tool_call>{"name": "time", "arguments": {"zone": 1}}</tool_call>\n',
            TWO,
            "",
        ),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', ONE, ""),
        ("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>', [("time", {})], ""),
        ("hermes", '<tool_call>{"name": "time"}</tool_call>', [("time", {})], ""),
        (
            "hermes",
            '<tool_call>{"name": "time", "arguments": {"a": "}</tool_call>\\"", "b": [1, {"c": "\\\\"}]}}</tool_call>',
            [("time", {"a": '}</tool_call>"', "b": [1, {"c": "\\"}]})],
            "",
        ),
        ("hermes", "no call at all, though <tool", [], "no call at all, though <tool"),
        ("hermes", "<tool_call>sorry</tool_call> ", [], "<tool_call>sorry</tool_call> "),
        ("hermes", '<tool_call>{"nome": "x"}</tool_call>', [], '<tool_call>{"nome": "x"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "two words"}', [], '<tool_call>{"name": "two words"}'),
        ("hermes", '<tool_call>{"name": "weath', [], '<tool_call>{"name": "weath'),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "Paris"}}', ONE, ""),
        ("llama3_json", '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', ONE, ""),
        (
            "llama3_json",
            '{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "time", "arguments": {"zone": 1}}',
            TWO,
            "",
        ),
        ("llama3_json", '{"name": "Bob", "age": 5}', [], '{"name": "Bob", "age": 5}'),
        ("llama3_json", '{"name": "Bob", "parameters": {}}', [], '{"name": "Bob", "parameters": {}}'),
        ("llama3_json", ' It is {"name": "weather"}', [], ' It is {"name": "weather"}'),
        ("llama3_json", "<|python_tag|>print(1)", [], "<|python_tag|>print(1)"),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]', ONE, ""),
        (
            "mistral",
            'Well. [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, '
            '{"name": "time", "arguments": {"zone": 1}}]',
            TWO,
            "Well.",
        ),
        ("mistral", '[TOOL_CALLS]weather{"city": "Paris"}[TOOL_CALLS]time{"zone": 1}', TWO, ""),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}', ONE, ""),
        ("mistral", '[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{"city": "Paris"}', ONE, ""),
        ("mistral", "[TOOL_CALLS]\nno name\n{", [], "[TOOL_CALLS]\nno name\n{"),
        ("mistral", "[TOOL_CALLS]weather", [], "[TOOL_CALLS]weather"),
        ("mistral", "[TOOL_CALLS] [ 1, 2]", [], "[TOOL_CALLS] [ 1, 2]"),
        ("mistral", "[TOOL_CALLS][]", [], "[TOOL_CALLS][]"),
        ("mistral", '[TOOL_CALLS]\n weather {"city": "Paris"}', ONE, ""),
    ],
)
def test_tool_calls_in_each_format(tool: str, text: str, expected: list[Any], content: str) -> None:
    output = whole(text, tool)
    assert calls(output) == expected
    assert output.content == content


def test_a_truncated_call_keeps_its_partial_arguments() -> None:
    output = whole('<tool_call>{"name": "weather", "arguments": {"city": "Pa', "hermes")
    assert [(call.name, call.arguments) for call in output.calls] == [("weather", '{"city": "Pa')]


REQUIRED, NAMED = ToolSelection(TOOLS, "", parallel=True), ToolSelection(TOOLS, "weather", parallel=True)
TO_PARIS = '{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2]}}'
CALLING = [
    ("hermes", AUTO, "<think>So?</think>Sure. " + f"<tool_call>{TO_PARIS}</tool_call>\n" * 2 + "Done."),
    ("llama3_json", AUTO, f"{TO_PARIS}; {TO_PARIS}"),
    ("mistral", AUTO, f"[TOOL_CALLS] [{TO_PARIS}, {TO_PARIS}] "),
    ("mistral", AUTO, '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]time{} '),
    ("hermes", REQUIRED, f"[{TO_PARIS}, {TO_PARIS}] "),
    ("hermes", NAMED, '{"city": "Paris", "days": [1, 2]} '),
    ("hermes", AUTO, '{"a": "structured", "b": [1, 2]} '),
]


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize(("tool", "choice", "text"), CALLING)
def test_the_finish_reason_says_that_all_calls_are_complete(
    tool: str, choice: ToolSelection, text: str, *, is_stopped: bool
) -> None:
    """A stop string, or the end of the output, may be anywhere in a call."""
    reasons = set()
    for at in range(1, len(text)):
        stop = text[at : at + 4]
        plan = OutputPlan([stop] if is_stopped else [], ParseOptions(choice))
        composer = plan.composer(MODEL, ParserFactory(MODEL, tool, "qwen3"), "r")
        output = MODEL.encode(text if is_stopped else text[:at])
        deltas = [composer.push([token], []) for token in output if not composer.stopped]
        found = merge_deltas([*deltas, *([] if composer.stopped else [composer.finish()])])
        reason = composer.reason("stop")
        assert composer.reason("length") == "length"
        assert reason == (
            "tool_calls" if found.calls and all(is_json(one.arguments) for one in found.calls) else "stop"
        )
        reasons.add(reason)
    assert "stop" in reasons
    assert is_stopped or ("tool_calls" in reasons) == ("city" in text)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_arguments_are_streamed_and_the_id_is_sent_once() -> None:
    pieces = ['<tool_call>{"name": "weath', 'er", "argum', 'ents": {"ci', 'ty": "Paris"', "}}</tool_call>"]
    output = [piece.calls for piece in parse(pieces, "hermes") if piece.calls]
    assert [call[0].arguments for call in output] == ['{"ci', 'ty": "Paris"', "}"]
    assert [(call[0].name, call[0].call_id != "") for call in output] == [("weather", True), ("", False), ("", False)]


def test_call_ids_depend_on_the_request_and_mistral_uses_nine_characters() -> None:
    text = '{"name": "time", "arguments": {}}'
    hermes = whole(f"<tool_call>{text}</tool_call><tool_call>{text}</tool_call>", "hermes").calls
    assert [call.call_id for call in hermes] == [call_ids("r")(0), call_ids("r")(1)]
    assert len({call_ids(name)(at) for name in "ab" for at in range(3)}) == 6
    (mistral,) = whole(f"[TOOL_CALLS][{text}]", "mistral").calls
    assert len(mistral.call_id) == 9
    assert mistral.call_id.isalnum()


def test_without_parallel_calls_only_the_first_call_is_kept() -> None:
    text = '<tool_call>{"name": "time"}</tool_call>' * 3
    assert calls(whole(text, "hermes", how=ParseOptions(ToolSelection(TOOLS, None, parallel=False)))) == [("time", {})]


def test_named_call_output_is_arguments_and_required_call_output_is_a_list() -> None:
    named = whole(
        '{"city": "Paris"}', how=ParseOptions(ToolSelection(TOOLS, "weather", parallel=False), structured=True)
    )
    assert calls(named) == ONE
    text = '[{"name": "weather", "parameters": {"city": "Paris"}}, {"name": "time", "parameters": {"zone": 1}}]'
    required = ParseOptions(ToolSelection(TOOLS, "", parallel=True), structured=True)
    assert calls(whole(text, how=required)) == TWO
    assert whole("words from an engine that obeys nothing", how=required).content.startswith("words")


@pytest.mark.parametrize(
    ("name", "is_open", "text", "reasoning", "content"),
    [
        ("qwen3", False, "<think>\nwell\n</think>\n\nYes.", "well\n", "Yes."),
        ("qwen3", False, "Yes.", "", "Yes."),
        ("qwen3", False, "a <think> b", "", "a <think> b"),
        ("qwen3", False, "<think", "", "<think"),
        ("qwen3", True, "well</think>Yes.", "well", "Yes."),
        ("qwen3", True, "<think>well</think>Yes.", "well", "Yes."),
        ("qwen3", True, "cut off </th", "cut off </th", ""),
        ("deepseek_r1", False, "well</think>Yes.", "well", "Yes."),
        ("deepseek_r1", False, "well", "well", ""),
        ("qwen3", False, "<think></think>Yes.", "", "Yes."),
        ("qwen3", False, "<think>a</think>b</think>c", "a", "b</think>c"),
    ],
)
def test_reasoning_is_separated_from_content(name: str, is_open: bool, text: str, reasoning: str, content: str) -> None:
    output = whole(text, reasoning=name, how=ParseOptions(NO_TOOLS, is_open))
    assert (output.reasoning, output.content) == (reasoning, content)


def test_calls_within_reasoning_are_ignored() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    output = whole(f"<think>not {call}</think>\n{call}", "hermes", "qwen3")
    assert (output.reasoning, calls(output), output.content) == (f"not {call}", ONE, "")


def test_structured_output_has_no_implicit_reasoning() -> None:
    how = ParseOptions(NO_TOOLS, is_open=True, structured=True)
    assert whole('{"a": 1}', reasoning="deepseek_r1", how=how).content == '{"a": 1}'
    assert whole("<think>hm</think>1", reasoning="deepseek_r1", how=how).reasoning == "hm"


TAGS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(TAGS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALL = st.builds(
    lambda name, key, arguments, others: json.dumps({"id": others, "name": name, key: arguments}),
    st.sampled_from(["weather", "time", "Bob", "two words"]),
    st.sampled_from(["arguments", "parameters", "else"]),
    st.dictionaries(st.text(max_size=4), JSON, max_size=3) | JSON,
    JSON,
)
BITS = st.sampled_from([*TAGS, " ", "\n", ";", ",", "[", "]", "{", "}", '"', "\\", "name", "weather", "<", "a word "])
TEXTS = st.lists(CALL | BITS | st.text(max_size=6), max_size=14).map("".join)
HOW = st.builds(
    ParseOptions,
    st.sampled_from(
        [
            AUTO,
            ToolSelection(TOOLS, None, parallel=False),
            ToolSelection(TOOLS, "", parallel=True),
            ToolSelection(TOOLS, "time", False),
        ]
    ),
    st.booleans(),
    st.booleans(),
)


@st.composite
def cut(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(TEXTS)
    at = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return text, [text[begin:end] for begin, end in zip([0, *at], [*at, len(text)], strict=True)]


@given(cut(), st.sampled_from(FORMATS), st.sampled_from(["none", "qwen3", "deepseek_r1"]), HOW)
@example(("[TOOL_CALLS]time{}", ["[TOOL_", "CALLS]ti", "me{", "}"]), "mistral", "none", ParseOptions(AUTO))
def test_splitting_the_text_does_not_change_the_result(
    text: tuple[str, list[str]], tool: str, reasoning: str, how: ParseOptions
) -> None:
    uncut, pieces = text
    expected = whole(uncut, tool, reasoning, how)
    assert merge_deltas(parse(pieces, tool, reasoning, how)) == expected
    assert merge_deltas(parse(list(uncut), tool, reasoning, how)) == expected
    assert [call.index for call in expected.calls] == list(range(len(expected.calls)))


@given(cut(), st.sampled_from(FORMATS))
def test_invalid_calls_are_text(text: tuple[str, list[str]], tool: str) -> None:
    output = merge_deltas(parse(text[1], tool))
    if not output.calls:
        assert output.content == text[0]


@given(st.lists(st.tuples(st.sampled_from(["weather", "time"]), st.dictionaries(st.text(), JSON)), min_size=1), cut())
def test_random_calls_are_parsed_as_they_were_written(
    output: list[tuple[str, Any]], noise: tuple[str, list[str]]
) -> None:
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in output]
    texts = {
        "hermes": "".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects),
        "llama3_json": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
    }
    for tool, text in texts.items():
        assert calls(whole(text, tool)) == output, tool


class TestChoosing:
    """Selection of parsers by name or by the chat template."""

    @staticmethod
    def model(tmp_path: Path, template: str) -> Model:
        for name in ("tokenizer.json", "config.json"):
            (tmp_path / name).write_bytes((DEFAULT_MODEL / name).read_bytes())
        (tmp_path / "chat_template.jinja").write_text(template)
        return Model(tmp_path)

    @pytest.mark.parametrize(
        ("template", "tool", "reasoning"),
        [
            ("{{ tools }}<tool_call></tool_call>", "hermes", ""),
            ("<tool_call><function=x></tool_call></think>", "", "qwen3"),
            ("<tool_call><arg_key>", "", ""),
            ("[TOOL_CALLS]", "mistral", ""),
            ("<|python_tag|>", "llama3_json", ""),
            ("plain", "", ""),
        ],
    )
    def test_auto_selects_the_parser_by_the_template(
        self, tmp_path: Path, template: str, tool: str, reasoning: str
    ) -> None:
        parsing = ParserFactory(self.model(tmp_path, template))
        assert (parsing.tool, parsing.reasoning) == (tool, reasoning)

    def test_an_unknown_parser_is_rejected_with_the_known_names(self) -> None:
        with pytest.raises(Unusable, match="parsers are: auto, none, h"):
            ParserFactory(MODEL, "kimi_k2")
        with pytest.raises(Unusable, match="--reasoning-parser: unknown parser"):
            ParserFactory(MODEL, "none", "r1")

    def test_parsers_of_vllm_need_vllm(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            with pytest.raises(Unusable, match="--tool-call-parser vllm:kimi_k2: needs vLLM"):
                ParserFactory(MODEL, "vllm:kimi_k2")
        with pytest.raises(Unusable, match="use vLLM for both or for neither"):
            ParserFactory(MODEL, "vllm:kimi_k2", "qwen3")

    def test_tools_without_a_parser_are_rejected(self) -> None:
        with pytest.raises(ApiError, match="--tool-call-parser"):
            ParserFactory(MODEL, "none").require(AUTO)
        ParserFactory(MODEL, "none").require(ToolSelection(TOOLS, "", parallel=True))

    def test_no_parser_is_created_without_tools_and_reasoning(self) -> None:
        assert ParserFactory(MODEL, "hermes", "none").parser(ParseOptions(), "r") is None
        assert msgspec.to_builtins(whole("a", reasoning="qwen3"))["content"] == "a"
