"""Parameters of OpenAI and vLLM without effect are accepted; those with an effect that is not served are named."""

import json
from typing import Any

import pytest

from forebay.ingress.errors import ApiError
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.fields import Body, parse
from forebay.ingress.openai.requests import ChatBody, TextBody
from tests.ingress.conftest import NAME

REQUIRED: dict[type[Body], dict[str, Any]] = {
    ChatBody: {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]},
    TextBody: {"model": NAME, "prompt": "Hello"},
    EmbeddingBody: {"model": NAME, "input": "Hello"},
}
# Defaults of vLLM 0.32. Clients such as GuideLLM, and those generated from its OpenAPI document, send them all.
SHARED: dict[str, Any] = {
    "allowed_token_ids": None, "bad_words": [], "cache_salt": None, "ec_transfer_params": None, "echo": False,
    "frequency_penalty": None, "ignore_eos": False, "include_stop_str_in_output": False, "kv_transfer_params": None,
    "length_penalty": 1.0, "logit_bias": None, "logprob_token_ids": None, "max_tokens": None, "min_p": None,
    "min_tokens": 0, "mm_payload": "tensors", "n": 1, "presence_penalty": None, "priority": 0, "prompt_logprobs": None,
    "repetition_detection": None, "repetition_penalty": None, "request_id": None, "response_format": None,
    "return_mm_kwargs": None, "return_token_ids": None, "return_token_offsets": False,
    "return_tokens_as_token_ids": None, "routed_experts_prompt_start": 0, "seed": None, "session_id": None,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "stop": [], "stop_token_ids": [],
    "stream": False, "stream_interval": None, "stream_options": None, "structured_outputs": None, "temperature": None,
    "thinking_token_budget": None, "top_k": None, "top_p": None, "truncate_prompt_tokens": None,
    "truncation_side": None, "use_beam_search": False, "user": None, "vllm_xargs": None, "watermarking": None,
}  # fmt: skip
DEFAULTS: dict[type[Body], dict[str, Any]] = {
    ChatBody: {
        **SHARED, "add_generation_prompt": True, "add_special_tokens": False, "chat_template": None,
        "chat_template_kwargs": None, "continue_final_message": False, "documents": None, "include_reasoning": True,
        "logprobs": False, "max_completion_tokens": None, "media_io_kwargs": None, "mm_processor_kwargs": None,
        "parallel_tool_calls": True, "reasoning_effort": None, "return_prompt_text": None, "tool_choice": "none",
        "tools": None, "top_logprobs": 0,
    },
    TextBody: {**SHARED, "add_special_tokens": True, "logprobs": None, "prompt_embeds": None, "suffix": None},
    EmbeddingBody: {
        "add_generation_prompt": False, "add_special_tokens": True, "cache_salt": None, "chat_template": None,
        "chat_template_kwargs": None, "continue_final_message": False, "dimensions": None, "embed_dtype": "float32",
        "encoding_format": "float", "endianness": "native", "media_io_kwargs": None, "mm_processor_kwargs": None,
        "padding": None, "priority": 0, "request_id": None, "truncate_prompt_tokens": None, "truncation_side": None,
        "use_activation": None, "user": None,
    },
}  # fmt: skip
KINDS = list(REQUIRED)


def parsed(kind: type[Body], **fields: Any) -> Body:
    return parse(kind, json.dumps({**REQUIRED[kind], **fields}).encode())


@pytest.mark.parametrize("kind", KINDS)
def test_all_defaults_of_vllm_are_accepted(kind: type[Body]) -> None:
    parsed(kind, **DEFAULTS[kind])
    for name, value in DEFAULTS[kind].items():
        parsed(kind, **{name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_null_is_accepted_for_every_optional_parameter(kind: type[Body]) -> None:
    optional = {*kind.model_fields, *kind.neutral, *kind.ignored, *DEFAULTS[kind]} - REQUIRED[kind].keys()
    parsed(kind, **dict.fromkeys(optional))


@pytest.mark.parametrize("kind", KINDS)
def test_only_values_without_effect_are_accepted_for_parameters_that_are_not_served(kind: type[Body]) -> None:
    for name, accepted in kind.neutral.items():
        for value in accepted:
            parsed(kind, **{name: value})
        for value in (7, "a value with an effect", {"a": 1}, [1]):
            with pytest.raises(ApiError) as caught:
                parsed(kind, **{name: value})
            assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize("value", [None, False, "x"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_neither_api_are_unknown(kind: type[Body], value: object) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(kind, magic=value)
    assert caught.value.code == "unknown_parameter"


@pytest.mark.parametrize("name", ["include_usage", "include_obfuscation", "continuous_usage_stats"])
@pytest.mark.parametrize("kind", [ChatBody, TextBody])
def test_stream_options_accept_null(kind: type[Body], name: str) -> None:
    for value in (None, False, True):
        parsed(kind, stream=True, stream_options={name: value})


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "f", "defer_loading": None}},
        {"type": "function", "function": {"name": "f"}, "defer_loading": False},
    ],
)
def test_tools_accept_values_without_effect(tool: dict[str, Any]) -> None:
    parsed(ChatBody, tools=[tool])
