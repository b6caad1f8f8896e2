"""Tool calls and reasoning: formats, invalid calls, independence of splits, input of the template, and responses."""

import asyncio
import copy
import importlib.util
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.events.base import unpack_u32
from forebay.events.requests import RequestSubmitted
from forebay.ingress.errors import ApiError
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.openai.tools import NO_TOOLS, Function, Tool, ToolSelection
from forebay.ingress.parsers.composer import OutputPlan
from forebay.ingress.parsers.deltas import OutputDelta, merge_deltas
from forebay.ingress.parsers.parsers import call_ids
from forebay.ingress.parsers.selection import ParseOptions, ParserFactory
from forebay.runtime.errors import ConfigError
from tests.depth import examples
from tests.ingress.conftest import CHAT, HELLO, NAME, Scene, chat, error, make_scene

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
    (
        "qwen3_coder",
        AUTO,
        "Sure. <tool_call><function=weather><parameter=city>\nParis\n</parameter></function></tool_call> ",
    ),
    ("glm45", AUTO, "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call> "),
    ("pythonic", AUTO, "[weather(city='Paris'), time()] "),
    ("gemma4", AUTO, '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:[1,2]}<tool_call|> '),
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
        deltas = [composer.push([token]) for token in output if not composer.stop]
        found = merge_deltas([*deltas, *([] if composer.stop else [composer.finish()])])
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


@examples(0.5)
@given(st.lists(st.tuples(st.sampled_from(["weather", "time"]), st.dictionaries(st.text(), JSON)), min_size=1))
def test_random_calls_are_parsed_as_they_were_written(output: list[tuple[str, Any]]) -> None:
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in output]
    texts = {
        "hermes": "".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects),
        "llama3_json": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
    }
    for tool, text in texts.items():
        assert calls(whole(text, tool)) == output, tool


def card(template: str, *types: str) -> Model:
    model = copy.copy(MODEL)
    model.template_source, model.types = template, frozenset(types)
    return model


@pytest.mark.parametrize(
    ("template", "tool", "reasoning"),
    [
        ("{{ tools }}<tool_call></tool_call>", "hermes", ""),
        ("<tool_call><function=x></tool_call></think>", "qwen3_coder", "qwen3"),
        ("<tool_call><arg_key></think>", "glm45", "qwen3"),
        ("[TOOL_CALLS][/THINK]", "mistral", "mistral"),
        ("<|python_tag|>", "llama3_json", ""),
        ('<|start_header_id|>{"name": function name, "parameters": x}', "llama3_json", ""),
        ("<|python_tag|><function=", "", ""),
        ("<|python_start|>", "llama4_pythonic", ""),
        ("[func_name1(params_name1=", "llama4_pythonic", ""),
        ("<｜tool▁calls▁begin｜>```json</think>", "deepseek_v3", "qwen3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31", ""),
        ("｜DSML｜function_calls message.tool_calls", "deepseek_v32", ""),
        ("｜DSML｜tool_calls>", "deepseek_v4", ""),
        ("'｜DSML｜' + ' calls>'", "deepseek_v41", ""),
        ("<|tool_calls_section_begin|></think>", "kimi_k2", "qwen3"),
        ("<minimax:tool_call>", "minimax_m2", ""),
        ("<beginning_of_sentence><tool_calls>", "minimax", ""),
        ("<start_function_call>", "functiongemma", ""),
        ("<|channel>thought<|tool_call>", "gemma4", "gemma4"),
        ("<|channel|>final<|message|>", "openai", "openai_gptoss"),
        ("<|tool_call|>Here is my thought process:", "granite", "granite"),
        ("<|tool|><|/tool|>", "phi4_mini_json", ""),
        ("plain", "", ""),
    ],
)
def test_auto_selects_the_parser_by_the_template(template: str, tool: str, reasoning: str) -> None:
    parsing = ParserFactory(card(template))
    assert (parsing.tool, parsing.reasoning) == (tool, reasoning)


@pytest.mark.parametrize(("kind", "name"), [("gpt_oss", "openai"), ("llama4", "llama4_pythonic"), ("llama", "")])
def test_auto_selects_the_parser_by_the_model_type_if_the_template_shows_none(kind: str, name: str) -> None:
    assert ParserFactory(card("{{ tools }}", kind)).tool == name


def test_the_model_type_decides_between_formats_of_the_template(caplog: pytest.LogCaptureFixture) -> None:
    both = "<|tool_calls_section_begin|><minimax:tool_call>"
    assert ParserFactory(card(both, "kimi_k2")).tool == "kimi_k2"
    assert not caplog.messages
    assert ParserFactory(card(both, "other")).tool == ""
    (warning,) = caplog.messages
    assert "the format of kimi_k2, minimax_m2, so no tool-call parser is selected; set --tool-call-parser" in warning
    caplog.clear()
    assert ParserFactory(card("<tool_call>]<]minimax[>[")).tool == ""
    assert "the format of no parser of forebay" in caplog.text


def test_the_type_of_a_model_is_in_its_configuration(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEFAULT_MODEL / name).read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}')
    assert Model(tmp_path).types == {"gemma4", "gemma4_text"}


def test_unusable_parsers_are_rejected_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="parsers are: auto, none, deepseek_v3, "):
        ParserFactory(MODEL, "x")
    with pytest.raises(ConfigError, match="--reasoning-parser: unknown parser"):
        ParserFactory(MODEL, "none", "r1")
    with pytest.raises(ConfigError, match="--reasoning-parser qwen3: gpt-oss has one for both"):
        ParserFactory(MODEL, "openai", "qwen3")
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(ConfigError, match="--tool-call-parser vllm:kimi_k2: needs vLLM"):
            ParserFactory(MODEL, "vllm:kimi_k2")
    with pytest.raises(ConfigError, match="use vLLM for both or for neither"):
        ParserFactory(MODEL, "vllm:kimi_k2", "qwen3")


def test_tools_without_a_parser_are_rejected() -> None:
    with pytest.raises(ApiError, match="--tool-call-parser"):
        ParserFactory(MODEL, "none").require(AUTO)
    ParserFactory(MODEL, "none").require(ToolSelection(TOOLS, "", parallel=True))


def test_no_parser_is_created_without_tools_and_reasoning() -> None:
    assert ParserFactory(MODEL, "hermes", "none").parser(ParseOptions(), "r") is None
    assert whole("a", reasoning="qwen3").content == "a"


GREETING = HELLO[0]
SCHEMA = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "$defs": {"City": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time", "strict": True}}
TEMPLATE = """{% if tools %}{{ tools | tojson }}
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% if message.reasoning_content %}(thought {{ message.reasoning_content }}){% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}:{{ call.function.arguments.city }}
{%- endfor %}{% if message.tool_call_id %} #{{ message.tool_call_id }}{% endif %}<|im_end|>
{% endfor %}{{ mood }}{{ reasoning_effort }}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}"""
WEATHER_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("tools")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (path / name).write_bytes((DEFAULT_MODEL / name).read_bytes())
    (path / "chat_template.jinja").write_text(TEMPLATE + "{# </think> #}")
    return Model(path)


@pytest.fixture
async def tools(tool_model: Model) -> AsyncIterator[Scene]:
    async with make_scene(copy.copy(tool_model)) as made:  # a test may change attributes of its model
        yield made


class Answer(NamedTuple):
    """The response to a chat: its only choice, and the request with the text of its prompt."""

    choice: dict[str, Any]
    request: RequestSubmitted
    prompt: str

    @property
    def text(self) -> str | None:
        text: str | None = self.choice["message"]["content"]
        return text


async def submitted(scene: Scene, pending: "asyncio.Task[httpx.Response]") -> RequestSubmitted:
    """Return the next request, or fail with the response."""
    request = asyncio.create_task(scene.next_request())
    await asyncio.wait((pending, request), return_when=asyncio.FIRST_COMPLETED)
    if not request.done():
        request.cancel()
        raise AssertionError(pending.result().text)
    return request.result()


async def answer(scene: Scene, output: str, *, reason: str = "stop", **changes: Any) -> Answer:
    """Send a chat, and respond with an output."""
    pending = scene.start(CHAT, chat(max_tokens=90, **changes))
    request = await submitted(scene, pending)
    emit_text(scene, request, output, reason=reason)
    prompt = scene.model.tokenizer.decode(unpack_u32(request.token_ids), skip_special_tokens=False)
    response = await pending
    assert response.status_code == 200
    return Answer(response.json()["choices"][0], request, prompt)


def emit_text(scene: Scene, request: RequestSubmitted, text: str, *, reason: str = "stop") -> None:
    """Emit a text token by token and end the response."""
    at = 0
    for token in scene.model.encode(text):
        at = scene.emit(request.request_id, [token], first=at)
    scene.end(request.request_id, reason=reason, output=at)


async def test_tools_reach_the_template_and_a_call_is_returned(tools: Scene) -> None:
    found = await answer(tools, f"Let me look. {WEATHER_CALL}", tools=[WEATHER, TIME])
    assert json.loads(found.prompt.splitlines()[0]) == [WEATHER, TIME]
    assert found.request.sampling.structured is None
    assert (found.choice["finish_reason"], found.text) == ("tool_calls", "Let me look.")
    (call,) = found.choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": '{"city": "Paris"}'})
    assert call["id"].startswith("call_")


async def test_a_conversation_continues_with_the_result_of_a_tool(tools: Scene) -> None:
    message = (await answer(tools, WEATHER_CALL, tools=[WEATHER])).choice["message"]
    assert message["content"] is None
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    found = await answer(tools, "It rains.", tools=[WEATHER], messages=[GREETING, message, result])
    assert "<|im_start|>assistant\n<tool_call>weather:Paris<|im_end|>" in found.prompt
    assert f"<|im_start|>tool\nrain #{result['tool_call_id']}<|im_end|>" in found.prompt
    assert (found.text, found.choice["finish_reason"]) == ("It rains.", "stop")


async def test_tool_choice_none_omits_the_tools(tools: Scene) -> None:
    found = await answer(tools, WEATHER_CALL, tools=[WEATHER], tool_choice="none")
    assert "weather" not in found.prompt
    assert (found.text, found.choice["finish_reason"]) == (WEATHER_CALL, "stop")


@pytest.mark.parametrize("parallel", [True, False])
async def test_tool_choice_required_constrains_the_output_to_calls(tools: Scene, parallel: bool) -> None:
    output = '[{"name": "weather", "parameters": {"city": "Paris"}}]'
    forced: dict[str, Any] = {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": parallel}
    found = await answer(tools, output, **forced)
    structured = found.request.sampling.structured
    assert structured is not None
    schema = json.loads(structured.text)
    one, other = schema["items"]["anyOf"]
    assert (structured.kind, schema["type"], schema["minItems"]) == ("json_schema", "array", 1)
    assert schema.get("maxItems") == (None if parallel else 1)
    assert one["properties"]["parameters"] == {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}}
    assert schema["$defs"] == SCHEMA["$defs"]
    assert other["properties"] == {
        "name": {"type": "string", "enum": ["time"]},
        "parameters": {"type": "object", "properties": {}},
    }
    assert found.choice["finish_reason"] == "tool_calls"
    assert found.choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'


async def test_a_named_tool_constrains_the_output_to_its_arguments(tools: Scene) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    found = await answer(tools, '{"city": "Paris"}', tools=[WEATHER, TIME], tool_choice=named, reason="length")
    assert found.request.sampling.structured is not None
    assert json.loads(found.request.sampling.structured.text) == SCHEMA
    assert found.choice["finish_reason"] == "length"
    assert found.choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


async def test_a_message_may_have_many_calls(tools: Scene) -> None:
    called = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}] * 500
    await answer(tools, "x", messages=[GREETING, {"role": "assistant", "tool_calls": called}])


async def test_the_message_of_a_response_that_was_cut_anywhere_is_accepted_as_history(tools: Scene) -> None:
    output = f"<think>\nHm.\n</think>\nLet me look. {WEATHER_CALL}\n{WEATHER_CALL} Done."
    for end in range(1, len(output), 9):
        found = await answer(tools, output[:end], reason="length", tools=[WEATHER])
        assert found.choice["finish_reason"] == "length"
        await answer(tools, "x", tools=[WEATHER], messages=[GREETING, found.choice["message"], GREETING])


async def test_different_definitions_of_a_name_cannot_be_merged(tools: Scene) -> None:
    other = {"type": "object", "$defs": {"City": {"type": "integer"}}}
    both = [WEATHER, {"type": "function", "function": {"name": "other", "parameters": other}}]
    response = await tools.client.post(CHAT, json=chat(tools=both, tool_choice="required"))
    assert "'City' has two definitions" in response.json()["error"]["message"]


async def test_reasoning_that_begins_in_the_prompt(tools: Scene) -> None:
    found = await answer(tools, "Hm.</think>\n\nYes.", chat_template_kwargs={"enable_thinking": True, "mood": "calm"})
    assert found.prompt.endswith("calm<|im_start|>assistant\n<think>\n")
    message = found.choice["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Yes.", "Hm.", "Hm.")
    found = await answer(tools, "Yes.", messages=[GREETING, message, GREETING], reasoning_effort="low")
    assert "Yes.(thought Hm.)" in found.prompt
    assert "low<|im_start|>" in found.prompt
    assert "reasoning" not in found.choice["message"]


async def test_tools_and_reasoning_effort_are_rejected_if_the_template_ignores_them(tool_model: Model) -> None:
    (tool_model.directory / "chat_template.jinja").write_text("{{ messages }}")
    async with make_scene(Model(tool_model.directory)) as plain:
        for fields, says in (({"reasoning_effort": "high"}, "reasoning_effort is"), ({"tools": [WEATHER]}, "tools")):
            response = await plain.client.post(CHAT, json=chat(**fields))
            assert error(response)[0] == 400
            assert "not support" in response.json()["error"]["message"]
            assert says in response.json()["error"]["message"]


async def test_openai_client_streams_reasoning_and_calls(tools: Scene) -> None:
    text = f"<think>\nHm.\n</think>\nLook: {WEATHER_CALL}\n{WEATHER_CALL}"
    async with tools.openai_client() as client:

        async def stream() -> Any:
            messages: Any = HELLO
            tools: Any = [WEATHER]
            async with client.chat.completions.stream(model=NAME, messages=messages, tools=tools) as events:
                thought = ""
                async for event in events:
                    if event.type == "chunk" and event.chunk.choices:
                        thought += getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
                return thought, await events.get_final_completion()

        pending = asyncio.create_task(stream())
        emit_text(tools, await tools.next_request(), text)
        thought, completion = await pending
    choice = completion.choices[0]
    assert (thought, choice.message.content, choice.finish_reason) == ("Hm.\n", "Look:", "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("weather", '{"city": "Paris"}')
    ] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_messages_parsed_by_the_openai_client_may_be_sent_back(tools: Scene) -> None:
    weather: Any = WEATHER
    strict: Any = {**weather, "function": {**weather["function"], "strict": True}}
    hello: Any = GREETING
    async with tools.openai_client() as client:
        pending = asyncio.create_task(client.chat.completions.parse(model=NAME, messages=[hello], tools=[strict]))
        emit_text(tools, await tools.next_request(), f"Look: {WEATHER_CALL}")
        message: Any = (await pending).choices[0].message
        assert message.tool_calls[0].function.parsed_arguments == {"city": "Paris"}
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        given: Any = {**message.model_dump(), "parsed": 1}
        back = client.chat.completions.create(model=NAME, messages=[hello, given, result])
        again = asyncio.create_task(back)
        emit_text(tools, await tools.next_request(), "It is sunny.")
        assert (await again).choices[0].message.content == "It is sunny."
