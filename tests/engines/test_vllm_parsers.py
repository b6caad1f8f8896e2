"""vLLM's parsers behind the interface of the ingress, which agree with forebay's, and its request parameters."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from forebay.events.base import pack_u32
from forebay.ingress.errors import ApiError
from forebay.ingress.http.queries import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.fields import Body
from forebay.ingress.openai.requests import ChatBody, StreamOptions, TextBody
from forebay.ingress.openai.sampling import JsonObject
from forebay.ingress.openai.tools import Function, Tool, ToolSelection
from forebay.ingress.parsers.deltas import OutputDelta, merge_deltas
from forebay.ingress.parsers.parsers import call_ids
from forebay.ingress.parsers.selection import ParseOptions, ParserFactory, VllmParser
from forebay.runtime.errors import ConfigError

pytest.importorskip("vllm", reason="vLLM is not installed here")

SCHEMA: JsonObject = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = (
    Tool(type="function", function=Function(name="weather", parameters=SCHEMA)),
    Tool(type="function", function=Function(name="time")),
)
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")
WEATHER = '{"name": "weather", "arguments": {"city": "São Paulo \\"SP\\"", "days": [1, {"a": null}]}}'
TIME = '{"name": "time", "arguments": {}}'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
XML += "</function>\n</tool_call>"
JSON = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory: Path = tmp_path_factory.mktemp("model")
    tokenizer = json.loads((DEFAULT_MODEL / "tokenizer.json").read_bytes())
    first = 1 + max(*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"]))
    flags = dict.fromkeys(("special", "normalized", "single_word", "lstrip", "rstrip"), False)
    tokenizer["added_tokens"] += [{**flags, "id": first + at, "content": tag} for at, tag in enumerate(TAGS)]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((DEFAULT_MODEL / "tokenizer_config.json").read_bytes())
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ tools }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
    return Model(directory)


def generated(model: Model, parsing: ParserFactory, text: str, step: int) -> OutputDelta:
    """Return the parsed response, with `step` tokens at a time."""
    how = ParseOptions(ToolSelection(TOOLS, None, parallel=True), prompt=pack_u32(model.encode("hi")))
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
