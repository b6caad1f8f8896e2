"""Forebay's output parsers agree with those of vLLM on well-formed output.

Left out is what vLLM 0.32 does not find in a stream: a call without arguments in Llama's format, and Mistral's list.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.openai.tools import Function, Tool, ToolSelection
from forebay.ingress.parsers.deltas import OutputDelta, merge_deltas
from forebay.ingress.parsers.selection import ParseOptions, ParserFactory

pytest.importorskip("vllm", reason="vLLM is not installed here")

TOOLS = tuple(Tool(type="function", function=Function(name=name)) for name in ("weather", "time"))
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")
WEATHER = '{"name": "weather", "arguments": {"city": "São Paulo \\"SP\\"", "days": [1, {"a": null}]}}'
TIME = '{"name": "time", "arguments": {}}'


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


def generated(model: Model, parsing: ParserFactory, text: str) -> OutputDelta:
    how = ParseOptions(ToolSelection(TOOLS, None, parallel=True), prompt_ids=model.encode("hi"))
    parser, decoder = parsing.parser(how, "r"), model.decoder(parsing.visible_tokens(how))
    assert parser is not None
    pieces = [parser.push(decoder.push([token]), [token]) for token in model.encode(text)]
    return merge_deltas([*pieces, parser.finish()])


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
    theirs = [name if name == "none" else f"vllm:{name}" for name in (tool, reasoning)]
    ours = found(generated(model, ParserFactory(model, tool, reasoning), text))
    assert ours == found(generated(model, ParserFactory(model, *theirs), text))
