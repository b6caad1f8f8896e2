"""Tool calls and reasoning in the published format of each model family, however the text is split or cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.openai.tools import Function, Tool, ToolSelection
from forebay.ingress.parsers.composer import OutputPlan
from forebay.ingress.parsers.deltas import OutputDelta, merge_deltas
from forebay.ingress.parsers.formats import (
    CALL_ALIASES,
    CALL_FORMATS,
    HARMONY,
    HARMONY_REASONING,
    REASONING_ALIASES,
    REASONING_FORMATS,
)
from forebay.ingress.parsers.selection import ParseOptions, ParserFactory
from tests.depth import examples
from tests.ingress.conftest import CHAT, HELLO, MESSAGES, NAME, RESPONSES, make_scene
from tests.ingress.golden_calls import (
    ARGUMENTS,
    AUTO,
    CALLS,
    GOLDEN,
    JSON,
    LLAMA,
    MARKS,
    SCHEMA,
    THOUGHT,
    TIME,
    TOOLS,
    Golden,
    write_marked_model,
)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("marked")
    write_marked_model(directory)
    return Model(directory)


MODEL = Model(DEFAULT_MODEL)


def parsed(golden: Golden, pieces: list[str], choice: ToolSelection = AUTO) -> OutputDelta:
    is_open = "</think>" in golden.text and "<think>" not in golden.text
    factory = ParserFactory(MODEL, golden.tool, golden.reasoning or "none")
    parser = factory.parser(ParseOptions(choice, is_open=is_open), "r")
    assert parser is not None
    return merge_deltas([*(parser.push(piece, []) for piece in pieces), parser.finish()])


def calls(output: OutputDelta) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in output.calls]


NAMES = [f"{at}-{golden.tool}" for at, golden in enumerate(GOLDEN)]
each_golden = pytest.mark.parametrize("golden", GOLDEN, ids=NAMES)


def test_each_format_has_a_golden_response() -> None:
    tools = {CALL_ALIASES.get(golden.tool, golden.tool) for golden in GOLDEN}
    assert tools == {*CALL_FORMATS, HARMONY}
    reasoning = {REASONING_ALIASES.get(golden.reasoning, golden.reasoning) for golden in GOLDEN}
    assert reasoning == {*REASONING_FORMATS, HARMONY_REASONING, ""}


@each_golden
def test_golden_response_at_every_split(golden: Golden) -> None:
    text = golden.text
    whole = parsed(golden, [text])
    assert (whole.reasoning, whole.content, calls(whole)) == (golden.thought, golden.content, CALLS)
    assert len({call.call_id for call in whole.calls}) == 2
    for at in range(len(text)):
        assert parsed(golden, [text[:at], text[at:]]) == whole, at
    assert parsed(golden, list(text)) == whole


@each_golden
def test_golden_response_token_by_token(marked: Model, golden: Golden) -> None:
    """The tags are special tokens, which the decoder hides unless the parser needs them."""
    is_open = "</think>" in golden.text and "<think>" not in golden.text
    plan = OutputPlan(parsing=ParseOptions(AUTO, is_open=is_open))
    composer = plan.composer(marked, ParserFactory(marked, golden.tool, golden.reasoning or "none"), "r")
    deltas = [composer.push([token_id]) for token_id in marked.encode(golden.text)]
    found = merge_deltas([*deltas, composer.finish()])
    assert found == parsed(golden, [golden.text])
    assert composer.reason("stop") == "tool_calls"


@each_golden
def test_golden_response_that_is_cut_anywhere(golden: Golden) -> None:
    """Nothing but tags is lost. Only the tags of a call that has no name yet become content."""
    for end in range(len(golden.text)):
        text = golden.text[:end]
        found = parsed(golden, list(text))
        assert golden.thought.startswith(found.reasoning[: len(golden.thought)])
        assert [call.name for call in found.calls] == [name for name, _ in CALLS][: len(found.calls)]
        seen = found.reasoning + found.content + "".join(call.name + call.arguments for call in found.calls)
        for word in ("think", "so.", "Let", "look.", "São", "Paulo"):
            is_tag = word == "think" and "I think" not in text
            assert is_tag or word not in text or word in seen, (word, text)
        if len(found.calls) == 2 and found.calls[1].arguments:
            assert found.content.startswith(golden.content)
            assert not [mark for mark in MARKS if len(mark) > 3 and mark in found.content]


@each_golden
def test_only_the_first_call_without_parallel_calls(golden: Golden) -> None:
    found = parsed(golden, list(golden.text), ToolSelection(TOOLS, None, parallel=False))
    assert calls(found) == CALLS[:1]
    assert found.content == golden.content


@each_golden
def test_forced_calls_in_each_format(golden: Golden) -> None:
    """The engine enforces the JSON of a forced call, in which no family has tags."""
    factory = ParserFactory(MODEL, golden.tool, golden.reasoning or "none")
    for forced, text in (("get_weather", JSON), ("", f"[{LLAMA}]")):
        options = ParseOptions(ToolSelection(TOOLS, forced, parallel=False), is_open=True, structured=True)
        parser = factory.parser(options, "r")
        assert parser is not None
        found = merge_deltas([*(parser.push(char, []) for char in text), parser.finish()])
        assert (calls(found), found.content, found.reasoning) == (CALLS[:1], "", "")


@pytest.mark.parametrize(
    ("tool", "text", "expected", "content"),
    [
        # A tool name with markup in it
        ("qwen3_coder", "<function=<tool_call>>x", [], "<function=<tool_call>>x"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>a b<|tool_call_argument_begin|>{}", [], None),
        ("minimax_m2", '<minimax:tool_call><invoke name="a<b>">', [], None),
        ("gemma4", "<|tool_call>call:<|tool_call>{", [], None),
        # A value without an end tag, calls without the tags around them, and text between calls
        ("qwen3_coder", "<function=time><parameter=a>1<parameter=b>2</function>", [{"a": "1", "b": "2"}], ""),
        ("qwen3_coder", "<function=time>\n</function>\nDone.", [{}], "Done."),
        ("glm45", "<tool_call>time<arg_key>a</arg_key><arg_value></arg_value></tool_call>", [{"a": ""}], ""),
        ("glm45", "<tool_call>two words</tool_call>", [], None),
        ("hermes", f"A\n<tool_call>{TIME}</tool_call>\nB", [{}], "A\nB"),
        ("minimax_m2", "<minimax:tool_call><invoke name='time'></invoke><invoke name=time></invoke>", [{}, {}], ""),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>time<|tool_call_argument_begin|><|tool_call_end|>",
            [{}],
            "",
        ),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>now", [], None),
        (
            "gemma4",
            '<|tool_call>call:time{a:-1.5,<|"|>b<|"|>:x y,c:{},d:[]}<tool_call|>',
            [{"a": -1.5, "b": "x y", "c": {}, "d": []}],
            "",
        ),
        (
            "deepseek_v32",
            '<｜DSML｜function_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="days" string="true">3'
            '</｜DSML｜parameter><｜DSML｜parameter name="x" string="false">3</｜DSML｜parameter><｜DSML｜parameter '
            'name="metric">true</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>',
            [{"days": "3", "x": 3, "metric": True}],
            "",
        ),
        # Python: only literals by keyword, of functions of the request
        (
            "pythonic",
            '[time(a=-1.5, b=(1, None), c=\'\\n\', d="""x\'""", e=\'\')]',
            [{"a": -1.5, "b": [1, None], "c": "\n", "d": "x'", "e": ""}],
            "",
        ),
        ("pythonic", "[time(1)]", [], None),
        ("pythonic", "[time(a=b)]", [], None),
        ("pythonic", "[time(**{'a': 1})]", [], None),
        ("pythonic", "[time(a=1, a=2)]", [], None),
        ("pythonic", "[time(a={1})]", [], None),
        ("pythonic", "[time(a=1e999)]", [], None),
        ("pythonic", "[time(a='\\ud800')]", [], None),
        ("pythonic", "[time(a='(')", [{"a": "("}], ""),
        ("pythonic", "[1] says [time()]", [], None),
        ("pythonic", "[sorted(a=1)]", [], None),
        ("pythonic", "[time(" + "[" * 5000 + ")]", [], None),
    ],
)
def test_invalid_and_incomplete_calls(tool: str, text: str, expected: list[Any], content: str | None) -> None:
    golden = Golden(tool, "", text)
    found = parsed(golden, list(text))
    assert found == parsed(golden, [text])
    assert [arguments for _, arguments in calls(found)] == expected
    assert found.content == (text if content is None else content)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, " a\n", " a\n"),
        ({}, "3", "3"),
        (None, "3", "3"),
        ({"type": "integer"}, " 3 ", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["null", "string"]}, "null", None),
        ({"type": ["integer", "string"]}, "[3]", "[3]"),
        ({"type": ["integer", "string"]}, "3", 3),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "object"}, "[" * 5000, "[" * 5000),
        ({"enum": [1, None]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/self~1me"}]}, "1", 1),
        ({"$ref": "#/$defs/none"}, "1", "1"),
        ({"$ref": "#/$defs/whole"}, "1", 1),
    ],
)
def test_values_have_the_types_of_the_schema(schema: Any, text: str, value: Any) -> None:
    defs = {"whole": {"type": "integer"}, "self/me": {"anyOf": [{"$ref": "#/$defs/self~1me"}, {"type": "null"}]}}
    parameters: dict[str, Any] = {"properties": {"a": schema}, "$defs": defs}
    choice = ToolSelection((Tool(type="function", function=Function(name="f", parameters=parameters)),), None, True)
    call = f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    assert calls(parsed(Golden("glm45", "", ""), list(call), choice)) == [("f", {"a": value})]


def test_strings_are_streamed_and_other_values_once_they_are_complete() -> None:
    parser = ParserFactory(MODEL, "qwen3_coder", "none").parser(ParseOptions(AUTO), "r")
    assert parser is not None
    pieces = [
        "<function=get_weather>",
        "<parameter=city>\nPa",
        "ris",
        "\n</para",
        "meter><parameter=days>1",
        "2</",
        "parameter>",
    ]
    found = [[call.arguments for call in parser.push(piece, []).calls] for piece in pieces]
    assert found == [["{"], ['"city": "Pa'], ["ris"], [], ['", "days": '], [], ["12"]]


def test_text_after_a_tag_is_kept_back_only_as_long_as_a_name_may_be() -> None:
    parser = ParserFactory(MODEL, "mistral", "none").parser(ParseOptions(AUTO), "r")
    assert parser is not None
    text = "[TOOL_CALLS]" + "x" * 300
    assert merge_deltas([parser.push(char, []) for char in text]).content == text


def test_structured_output_of_gpt_oss_may_contain_tags() -> None:
    parser = ParserFactory(MODEL, HARMONY, HARMONY_REASONING).parser(ParseOptions(AUTO, structured=True), "r")
    assert parser is not None
    text = '{"a": "<|end|><|channel|>"}'
    assert merge_deltas([parser.push(text, []), parser.finish()]).content == text


def test_cut_arguments_are_returned_as_they_were_written() -> None:
    for tool, text, arguments in [
        ("qwen3_coder", "<function=get_weather><parameter=city>\nPar", '{"city": "Par'),
        ("qwen3_coder", "<function=get_weather><parameter=city>Paris</param", '{"city": "Paris'),
        ("glm45", "<tool_call>get_weather<arg_key>tags</arg_key><arg_value>[1, 2", '{"tags": [1, 2'),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Par', '{"city": "Par'),
        ("gemma4", "<|tool_call>call:get_weather{days:4", '{"days": 4'),
        (HARMONY, '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Par<|e', '{"city": "Par'),
    ]:
        found = parsed(Golden(tool, "", text), list(text))
        assert [(call.name, call.arguments) for call in found.calls] == [("get_weather", arguments)]
        assert found.content == ""


def test_calls_of_kimi_keep_the_ids_that_the_model_wrote() -> None:
    one = "<|tool_call_begin|>functions.time:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{one}{one}<|tool_calls_section_end|>"
    first, second = parsed(Golden("kimi_k2", "", text), [text]).calls
    assert first.call_id == "functions.time:7"
    assert second.call_id.startswith("call_")


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "names"),
    [
        ("<|channel|>final<|message|>Yes.<|return|>", "", "Yes.", []),
        ("Yes.", "", "Yes.", []),
        (" to=functions.time<|channel|>commentary json<|message|>{}", "", "", ["time"]),
        ("<|channel|>commentary to=time<|message|>{}", "", "", ["time"]),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", "", []),
        ("<|channel|>commentary to=browser.search code<|message|>{}<|call|>", "{}", "", []),
        ("<|channel|>final<|message|>A<|channel|>final<|message|>B<|end|>", "", "AB", []),
        ("<|channel|>ana", "", "", []),
        ("<|channel|>final<|message|>A<|end|>B", "", "AB", []),
        ("<|channel|>" + "x" * 600, "", "<|channel|>" + "x" * 600, []),
        ("tomorrow", "", "tomorrow", []),
        ("to", "", "", []),
    ],
)
def test_messages_of_harmony(text: str, reasoning: str, content: str, names: list[str]) -> None:
    golden = Golden(HARMONY, HARMONY_REASONING, text)
    found = parsed(golden, list(text))
    assert found == parsed(golden, [text])
    assert (found.reasoning, found.content, [call.name for call in found.calls]) == (reasoning, content, names)


def test_without_tools_a_call_of_harmony_is_text() -> None:
    text = "<|channel|>commentary to=functions.time<|message|>{}<|call|>"
    found = parsed(Golden(HARMONY, HARMONY_REASONING, text), [text], ToolSelection((), None, parallel=True))
    assert (found.content, found.calls) == ("{}", ())


def test_a_call_ends_reasoning_in_families_whose_models_omit_its_end() -> None:
    text = f"<think>{THOUGHT}<minimax:tool_call><invoke name=time></invoke></minimax:tool_call>"
    found = parsed(Golden("minimax_m2", "minimax_m2", text), list(text))
    assert (found.reasoning, calls(found)) == (THOUGHT, [("time", {})])


PIECES = st.sampled_from(
    [
        *MARKS,
        *(golden.text for golden in GOLDEN),
        " ",
        "\n",
        ",",
        ";",
        "[",
        "]",
        "{",
        "}",
        '"',
        "'",
        "\\",
        "time",
        "(",
        ")",
        "=",
        "a",
        ":",
    ]
)
NAMED = st.sampled_from([*CALL_FORMATS, HARMONY])
THINKING_NAMES = st.sampled_from(["none", *REASONING_FORMATS])


@given(st.lists(PIECES | st.text(max_size=5), max_size=12).map("".join), NAMED, THINKING_NAMES, st.data())
def test_random_text_that_is_split_and_cut(text: str, tool: str, reasoning: str, data: st.DataObject) -> None:
    text = text[: data.draw(st.integers(0, len(text)))]
    golden = Golden(tool, reasoning if tool != HARMONY else HARMONY_REASONING, "")
    whole = parsed(golden, [text])
    at = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *at], [*at, len(text)], strict=True)]
    assert parsed(golden, pieces) == whole
    assert parsed(golden, list(text)) == whole
    if reasoning == "none" and tool != HARMONY and not whole.calls:
        assert whole.content == text


WORDS = st.text(st.characters(exclude_characters="<>[]｜|", exclude_categories=["Cs"]), max_size=12)


def encoded(tool: str, city: str) -> str:
    texts = {
        "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="get_weather">'
        f'<｜DSML｜parameter name="city" string="true">{city}</｜DSML｜parameter></｜DSML｜invoke>'
        "</｜DSML｜function_calls>",
        "gemma4": f'<|tool_call>call:get_weather{{city:<|"|>{city}<|"|>}}<tool_call|>',
        "glm45": f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>{city}</arg_value></tool_call>",
        "minimax_m2": f"<minimax:tool_call><invoke name=get_weather><parameter name=city>{city}</parameter></invoke>",
        "pythonic": f"[get_weather(city={city!r})]",
        "qwen3_coder": f"<function=get_weather><parameter=city>\n{city}\n</parameter></function>",
    }
    return texts[tool]


@examples(0.5)
@given(st.sampled_from(["deepseek_v32", "gemma4", "glm45", "minimax_m2", "pythonic", "qwen3_coder"]), WORDS)
def test_random_arguments_are_parsed_as_they_were_written(tool: str, city: str) -> None:
    text = encoded(tool, city)
    assert calls(parsed(Golden(tool, "", ""), list(text))) == [("get_weather", {"city": city})]


@pytest.fixture(scope="module")
def minimax(marked: Model) -> Model:
    (marked.directory / "chat_template.jinja").write_text(
        "{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}"
        "<minimax:tool_call><think></think><think>"
    )
    return Model(marked.directory)


def chat_parts(body: Any, events: list[Any]) -> tuple[str, str, str]:
    """Return the reasoning, the content and the arguments of the first call."""
    if not events:
        found = body["choices"][0]["message"]
        return found["reasoning_content"], found["content"], found["tool_calls"][0]["function"]["arguments"]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    made = [call for delta in deltas for call in delta.get("tool_calls") or () if call["index"] == 0]
    return (
        "".join(delta.get("reasoning_content") or "" for delta in deltas),
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(call["function"].get("arguments") or "" for call in made),
    )


def response_parts(body: Any, events: list[Any]) -> tuple[str, str, str]:
    reasoning, text, call, _ = (events[-1]["response"] if events else body)["output"]
    return reasoning["content"][0]["text"], text["content"][0]["text"], call["arguments"]


def message_parts(body: Any, events: list[Any]) -> tuple[str, str, str]:
    if not events:
        thinking, text, use, _ = body["content"]
        return thinking["thinking"], text["text"], json.dumps(use["input"])
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    keys = enumerate(("thinking", "text", "partial_json"))
    thought, content, arguments = (
        "".join(event["delta"].get(key, "") for event in deltas if event["index"] == index) for index, key in keys
    )
    return thought, content, arguments


FUNCTION = {"name": "get_weather", "parameters": SCHEMA}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "parts"),
    [
        (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": FUNCTION}]}, chat_parts),
        (RESPONSES, {"input": "Hello", "tools": [{"type": "function", "strict": False, **FUNCTION}]}, response_parts),
        (
            MESSAGES,
            {"messages": HELLO, "max_tokens": 90, "tools": [{"name": "get_weather", "input_schema": SCHEMA}]},
            message_parts,
        ),
    ],
)
async def test_each_api_has_the_reasoning_and_calls_of_a_family(
    minimax: Model, path: str, body: dict[str, Any], parts: Any, is_stream: bool
) -> None:
    """The prompt opens the reasoning, and the chat template selects the parsers."""
    (golden,) = (one for one in GOLDEN if one.tool == "minimax_m2")
    async with make_scene(minimax) as scene:
        asked = scene.start(path, {"model": NAME, "stream": is_stream, **body})
        request = (await scene.next_request()).request_id
        at = 0
        for token_id in minimax.encode(golden.text.removeprefix("<think>")):
            at = scene.emit(request, [token_id], first=at)
        scene.end(request, reason="stop", output=at)
        response = await asked
    assert response.status_code == 200, response.text
    events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
    thought, content, arguments = parts(None if is_stream else response.json(), events)
    assert (thought.removeprefix("\n"), content, json.loads(arguments)) == (golden.thought, golden.content, ARGUMENTS)
