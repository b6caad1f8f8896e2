"""vLLM's parsers behind the interface of the ingress, with any split of the tokens."""

import json
from pathlib import Path

import pytest

from forebay.ingress.errors import ApiError, Unusable
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.openai.sampling import JsonObject
from forebay.ingress.openai.tools import Function, Tool, ToolSelection
from forebay.ingress.parsers.deltas import OutputDelta, merge_deltas
from forebay.ingress.parsers.parsers import call_ids
from forebay.ingress.parsers.selection import ParseOptions, ParserFactory
from forebay.ingress.parsers.vllm_parsers import VllmParser

pytest.importorskip("vllm", reason="vLLM is not installed here")

SCHEMA: JsonObject = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = (Tool(type="function", function=Function(name="weather", parameters=SCHEMA)),)
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
XML += "</function>\n</tool_call>"
JSON = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return the default model's tokenizer with the tags that parsers need."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = json.loads((DEFAULT_MODEL / "tokenizer.json").read_bytes())
    first = 1 + max(tokenizer["model"]["vocab"].values())
    first = max(first, 1 + max(token["id"] for token in tokenizer["added_tokens"]))
    for at, tag in enumerate(("<tool_call>", "</tool_call>", "<think>", "</think>")):
        token = {"id": first + at, "content": tag, "special": False, "normalized": False}
        tokenizer["added_tokens"].append({**token, "single_word": False, "lstrip": False, "rstrip": False})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((DEFAULT_MODEL / "tokenizer_config.json").read_bytes())
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ tools }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
    return Model(Path(directory))


def generated(model: Model, parsing: ParserFactory, text: str, step: int) -> OutputDelta:
    """Return the parsed response, with `step` tokens at a time."""
    how = ParseOptions(ToolSelection(TOOLS, None, parallel=True), prompt_ids=model.encode("hi"))
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
    with pytest.raises(Unusable, match="--tool-call-parser vllm:hermez"):
        ParserFactory(model, "vllm:hermez")
    with pytest.raises(Unusable, match="use vLLM for both or for neither"):
        ParserFactory(model, "vllm:hermes", "qwen3")


def test_parser_exception_ends_the_response_with_an_error() -> None:
    with pytest.raises(ApiError, match="of vLLM failed on this response: AttributeError"):
        VllmParser(None, None, [], None).push("text", [1])
