"""vLLM's parsers behind the interface of the ingress, which agree with forebay's, and its request parameters."""

import json
from functools import cache
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.base import pack_u32
from forebay.ingress.errors import ApiError
from forebay.ingress.http.queries import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from forebay.ingress.model import Model
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.fields import Body
from forebay.ingress.openai.requests import ChatBody, StreamOptions, TextBody
from forebay.ingress.openai.sampling import JsonObject
from forebay.ingress.openai.tools import Function, Tool, ToolSelection
from forebay.ingress.parsers.deltas import OutputDelta, merge_deltas
from forebay.ingress.parsers.parsers import call_ids
from forebay.ingress.parsers.selection import NONE, ParseOptions, ParserFactory, VllmParser
from forebay.runtime.errors import ConfigError
from tests.ingress.golden_calls import ARGUMENTS, GOLDEN, Golden, write_marked_model

pytest.importorskip("vllm", reason="vLLM is not installed here")

SCHEMA: JsonObject = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = (
    Tool(type="function", function=Function(name="weather", parameters=SCHEMA)),
    Tool(type="function", function=Function(name="time")),
)
WEATHER = '{"name": "weather", "arguments": {"city": "São Paulo \\"SP\\"", "days": [1, {"a": null}]}}'
TIME = '{"name": "time", "arguments": {}}'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
XML += "</function>\n</tool_call>"
JSON = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("model")
    write_marked_model(directory, tokenizer_class="PreTrainedTokenizerFast", chat_template="{{ tools }}")
    return Model(directory)


def generated(
    model: Model, parsing: ParserFactory, text: str, step: int, tools: tuple[Tool, ...] = TOOLS, prompt: str = "hi"
) -> OutputDelta:
    """Return the parsed response, with `step` tokens at a time."""
    choice = ToolSelection(tools, None, parallel=True)
    how = ParseOptions(choice, is_open=parsing.is_open(prompt), prompt=pack_u32(model.encode(prompt)))
    parser, decoder = parsing.parser(how, "r"), model.decoder(parsing.visible_tokens(how))
    assert parser is not None
    token_ids = model.encode(text)
    pieces = []
    for at in range(0, len(token_ids), step):
        some = token_ids[at : at + step]
        pieces.append(parser.push(decoder.push(some), some))
    return merge_deltas([*pieces, parser.finish()])


@pytest.mark.parametrize(("name", "call"), [("hermes", JSON), ("qwen3_coder", XML)])
def test_tool_call_with_any_split_of_tokens(model: Model, name: str, call: str) -> None:
    parsing = ParserFactory(model, f"vllm:{name}", "none")
    for step in (1, 3, 1000):
        found = generated(model, parsing, f"Look.\n{call}", step)
        (piece,) = found.calls
        assert (piece.name, json.loads(piece.arguments)) == ("weather", {"city": "Paris", "days": 3}), step
        assert piece.call_id == call_ids("r")(0)
        assert found.content.strip() == "Look."


def test_reasoning_before_a_call(model: Model) -> None:
    parsing = ParserFactory(model, "vllm:hermes", "vllm:deepseek_r1")
    found = generated(model, parsing, f"<think>Hm.</think>{JSON}", 1)
    assert found.reasoning == "Hm."
    assert [call.name for call in found.calls] == ["weather"]


def test_missing_parser_is_reported(model: Model) -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser vllm:hermez"):
        ParserFactory(model, "vllm:hermez")
    with pytest.raises(ConfigError, match="use vLLM for both or for neither"):
        ParserFactory(model, "vllm:hermes", "qwen3")


def test_parser_exception_ends_the_response_with_an_error() -> None:
    with pytest.raises(ApiError, match="of vLLM failed on this response: AttributeError"):
        VllmParser(None, None, [], None).push("text", [1])


def found(one: OutputDelta) -> Any:
    calls = [(call.name, json.loads(call.arguments)) for call in one.calls]
    return calls, one.content.strip(), one.reasoning.strip()


@pytest.mark.parametrize(
    ("tool", "reasoning", "text"),
    [
        ("hermes", "none", f"<tool_call>\n{WEATHER}\n</tool_call>"),
        ("hermes", "none", f"Look.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{TIME}\n</tool_call>"),
        ("hermes", "none", "No call."),
        ("llama3_json", "none", WEATHER.replace("arguments", "parameters")),
        ("llama3_json", "none", f"{WEATHER}; {WEATHER}"),
        ("llama3_json", "none", "No call."),
        ("mistral", "none", '[TOOL_CALLS]weather{"city": "Paris"}'),
        ("mistral", "none", 'Look. [TOOL_CALLS]weather{"city": "Paris"}[TOOL_CALLS]time{}'),
        ("mistral", "none", "No call."),
        ("none", "deepseek_r1", "<think>Well.</think>Yes."),
        ("none", "deepseek_r1", "Well.</think>Yes."),
        ("none", "qwen3", "<think>\nWell.\n</think>\n\nYes."),
        ("hermes", "qwen3", f"<think>\nWell.\n</think>\n\n<tool_call>\n{WEATHER}\n</tool_call>"),
    ],
)
def test_parsers_agree_with_those_of_vllm(model: Model, tool: str, reasoning: str, text: str) -> None:
    """Left out is what vLLM 0.32 does not find: a call without arguments in Llama's format, and Mistral's list."""
    theirs = [name if name == "none" else f"vllm:{name}" for name in (tool, reasoning)]
    ours = found(generated(model, ParserFactory(model, tool, reasoning), text, 1))
    assert ours == found(generated(model, ParserFactory(model, *theirs), text, 1))


# Why vLLM parses a golden response otherwise. docs/models.md lists the differences.
DIFFERENCES = {
    ("deepseek_v31", "deepseek_v3"): "reasoning only if chat_template_kwargs has `thinking`",
    ("deepseek_v32", "deepseek_v3"): "reasoning only if chat_template_kwargs has `thinking`",
    ("functiongemma", ""): "only strings are arguments",
    ("gemma4", "gemma4"): "unquoted values that have no schema are strings",
    ("granite4", "granite"): "no calls after reasoning that has no tags",
    ("llama3_json", ""): "a call without arguments has empty text in a stream",
    ("mistral", ""): "a list of calls is one call of a function `[`",
    ("openai", "openai_gptoss"): "downloads its vocabulary",
    ("phi4_mini_json", ""): "no calls in a stream",
    ("minimax", "qwen3"): "no parser of this name",
}
PLAIN: JsonObject = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array"},  # vLLM does not follow references, so their values are strings
        "metric": {"type": "boolean"},
    },
}


GOLDEN_TOOLS = (Tool(type="function", function=Function(name="get_weather", parameters=PLAIN)), *TOOLS)


def parsed(model: Model, golden: Golden, *, is_vllm: bool) -> Any:
    """Return the parts of a golden response. Its prompt opens the reasoning."""
    prompt = "hi <think>" if "</think>" in golden.text else "hi"
    text = golden.text.removeprefix("<think>") if prompt.endswith("<think>") else golden.text
    prefix = "vllm:" if is_vllm else ""
    names = [prefix + name if name else NONE for name in (golden.tool, golden.reasoning)]
    return found(generated(model, factory(model, *names), text, 1, GOLDEN_TOOLS, prompt))


@cache
def factory(model: Model, tool: str, reasoning: str) -> ParserFactory:
    return ParserFactory(model, tool, reasoning)


def differs(golden: Golden) -> bool:
    # vLLM has the calls of Llama 4 in JSON as llama4_json.
    is_json = golden.tool == "llama4_pythonic" and "(" not in golden.text
    return is_json or (golden.tool, golden.reasoning) in DIFFERENCES


@pytest.mark.parametrize("golden", GOLDEN, ids=[f"{at}-{golden.tool}" for at, golden in enumerate(GOLDEN)])
def test_golden_responses_have_the_same_parts_in_vllm(model: Model, golden: Golden) -> None:
    try:
        is_equal = parsed(model, golden, is_vllm=False) == parsed(model, golden, is_vllm=True)
    except (ApiError, ConfigError, ValueError):
        is_equal = False
    assert is_equal is not differs(golden)


CITY = str(ARGUMENTS["city"])
BITS = st.sampled_from([*"aé\n <>/\"'\\{},:[]1=`()&😀", "null", "true", "word "])


@given(st.sampled_from([one for one in GOLDEN if not differs(one)]), st.lists(BITS, max_size=7).map("".join))
def test_random_arguments_are_the_same_in_vllm(model: Model, golden: Golden, city: str) -> None:
    text = golden.text
    for form in (lambda value: json.dumps(value, ensure_ascii=False), repr, str):
        text = text.replace(form(CITY), form(city)) if text == golden.text else text
    ours = parsed(model, golden._replace(text=text), is_vllm=False)
    assert ours[0][0][1]["city"] == city
    assert ours == parsed(model, golden._replace(text=text), is_vllm=True)


PAIRS = [
    (ChatBody, "openai.chat_completion.protocol", "ChatCompletionRequest"),
    (TextBody, "openai.completion.protocol", "CompletionRequest"),
    (StreamOptions, "generate.base.protocol", "StreamOptions"),
    (EmbeddingBody, "pooling.embed.protocol", "EmbeddingCompletionRequest"),
    (EmbeddingBody, "pooling.embed.protocol", "EmbeddingChatRequest"),
    (TokenizeChatBody, "serve.tokenize.protocol", "TokenizeChatRequest"),
    (TokenizeTextBody, "serve.tokenize.protocol", "TokenizeCompletionRequest"),
    (DetokenizeBody, "serve.tokenize.protocol", "DetokenizeRequest"),
]


@pytest.mark.filterwarnings("ignore")  # as in test_vllm_engine
@pytest.mark.parametrize(("ours", "module", "name"), PAIRS)
def test_every_parameter_of_vllm_is_known(ours: type[Body], module: str, name: str) -> None:
    theirs = getattr(import_module(f"vllm.entrypoints.{module}"), name)
    assert theirs.model_fields.keys() <= {*ours.model_fields, *ours.neutral, *ours.ignored}
