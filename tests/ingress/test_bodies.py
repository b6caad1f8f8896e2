"""Bodies of requests: invalid ones get a 4xx that names the parameter, and parameters without effect are accepted."""

import functools
import gzip
import json
import re
from collections.abc import AsyncIterator, Iterator
from math import isfinite
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from forebay.events.control import BusyThresholds, DisaggConfig, PoolConfigured, RouterConfig
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import CONTROL
from forebay.ingress.body_limits import BOM
from forebay.ingress.errors import ApiError
from forebay.ingress.kafka_api.request import body_of
from forebay.ingress.model import Model
from forebay.ingress.openai.embeddings import INPUTS_MAX, EmbeddingBody
from forebay.ingress.openai.fields import Body, parse
from forebay.ingress.openai.requests import CHOICES_MAX, ChatBody, Message, TextBody
from forebay.ingress.openai.tools import Function
from forebay.ingress.streams import Stream
from forebay.transport.base import Record
from tests.depth import examples
from tests.ingress import media_model
from tests.ingress.conftest import (
    ADMIN_TOKEN,
    BODY_MAX,
    CHAT,
    EMBED,
    HELLO,
    MODULE_LOOP,
    NAME,
    ROUTE,
    TEXT,
    Scene,
    chat,
    error,
    make_scene,
)


def message(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": "x", **fields}])


LORA = {"lora_name": "sql", "lora_path": "/adapters/sql"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now", "parameters": SCHEMA}}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
TIME = {"type": "function", "function": {"name": "time", "strict": True}}
BUSY, DISAGG = "/busy_threshold", "/disaggregation"
DECODE, PREFILL, SHARE = BusyThresholds.__struct_fields__
GRID = {
    "isl_max": 8_192,
    "target_max_ms": 1_000,
    "pools": [{"pool": "short", "priority": 0}, {"pool": "long", "priority": 1}],
    "cells": [["short"], ["long"]],
}


def routing(**changes: Any) -> dict[str, Any]:
    return {"grids": [{**GRID, **changes}]}


WHERE = "routing_constraints"
INVALID, UNSUPPORTED, OPPOSED = "invalid_value", "unsupported_parameter", "contradictory_routing"
POOLS: list[tuple[str, str, Any]] = [
    ("short", NAME, "aggregated"),
    ("long", NAME, "aggregated"),
    ("foreign", "other", "aggregated"),
    ("answers", NAME, "decode"),
]
GREETING = HELLO[0]
TOOL = {"type": "function", "function": {"name": "f"}}
UNKNOWN: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [GREETING], "color": 1}),
    (CHAT, {"messages": [{**GREETING, "color": 1}]}),
    (CHAT, {"messages": [{**GREETING, "content": [{"type": "text", "text": "a", "color": 1}]}]}),
    (CHAT, {"messages": [GREETING], "tools": [{**TOOL, "color": 1}]}),
    (CHAT, {"messages": [GREETING], "tools": [{**TOOL, "function": {"name": "f", "color": 1}}]}),
    (CHAT, {"messages": [GREETING], "response_format": {"type": "text", "color": 1}}),
    (CHAT, {"messages": [GREETING], "stream": True, "stream_options": {"color": 1}}),
    (TEXT, {"prompt": "a", "color": 1}),
    (TEXT, {"prompt": "a", "max_tokens": 2.0, "color": 1}),
    (EMBED, {"input": "a", "color": 1}),
]
# Each table has the columns that `CASES` names.
BODIES = [
    (CHAT, b"{", 400, "invalid_json", "not valid JSON"),
    (CHAT, b"", 400, "invalid_json", "not valid JSON"),
    (CHAT, b'{"model": "\xff"}', 400, "invalid_json", "not valid JSON"),
    (CHAT, b"[]", 400, "invalid_value", "the body"),
    (CHAT, {"messages": HELLO}, 400, "invalid_value", "model"),
    (CHAT, chat(model=5), 400, "invalid_value", "model"),
    (CHAT, chat(model="gpt"), 404, "model_not_found", "'gpt'"),
    (CHAT, chat(messages=[]), 400, "invalid_value", "messages"),
    (CHAT, chat(messages="hi"), 400, "invalid_value", "messages"),
    (CHAT, message(role="boss"), 400, "invalid_value", "messages[0].role"),
    (CHAT, message(content=None), 400, "invalid_value", "messages[0].content is missing"),
    (CHAT, message(content=5), 400, "invalid_value", "messages[0].content"),
    (CHAT, message(content=[{"type": "text"}]), 400, "invalid_value", "messages[0].content[0].text is missing"),
    (CHAT, message(tool_calls=[1]), 400, "invalid_value", "messages[0].tool_calls"),
    (CHAT, message(tool_call_id="1"), 400, "invalid_value", "messages[0].tool_call_id requires the role tool"),
    (CHAT, chat(max_tokens=0), 400, "invalid_value", "max_tokens"),
    (CHAT, chat(max_tokens=-1), 400, "invalid_value", "max_tokens"),
    (CHAT, chat(max_tokens=10**9), 400, "context_length_exceeded", "131072"),
    (CHAT, chat(max_tokens=10**30), 400, "context_length_exceeded", "131072"),
    (CHAT, chat(max_tokens="5"), 400, "invalid_value", "max_tokens"),
    (CHAT, chat(max_tokens=1.5), 400, "invalid_value", "max_tokens"),
    (CHAT, b'{"model": "test-model", "messages": [], "temperature": NaN}', 400, "invalid_value", ""),
    (CHAT, chat(temperature=3), 400, "invalid_value", "temperature"),
    (CHAT, chat(top_p=0), 400, "invalid_value", "top_p"),
    (CHAT, chat(n=True), 400, "invalid_value", "n"),
    (CHAT, chat(logprobs=0), 400, "invalid_value", "logprobs"),
    (CHAT, chat(stop=["a"] * 5), 400, "invalid_value", "stop"),
    (CHAT, chat(stop=""), 400, "invalid_value", "stop"),
    (CHAT, chat(stop=["a" * 1_025]), 400, "invalid_value", "a stop string is too long"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "invalid_value", "stream_options"),
    (TEXT, {"model": NAME, "prompt": ""}, 400, "empty_prompt", "empty"),
    (TEXT, {"model": NAME, "prompt": []}, 400, "empty_prompt", "empty"),
    (TEXT, {"model": NAME, "prompt": [10**6]}, 400, "invalid_value", "token id"),
    (TEXT, {"model": NAME, "prompt": [-1]}, 400, "invalid_value", "prompt"),
    (CHAT, b"x" * (BODY_MAX + 1), 413, "body_too_large", f"{BODY_MAX:,}"),
    ("/v1/nothing", {}, 404, "not_found", "/v1/nothing"),
    ("/v1/models", {}, 405, "method_not_allowed", "POST"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"min_tokens": 51}, "min_tokens is 51, which exceeds"),
    ({"logit_bias": {"x": 1}}, "keys of logit_bias must be token ids"),
    ({"logit_bias": {"99999999999999": 1}}, "keys of logit_bias"),
    ({"logit_bias": {"5": 1, "9": 101}}, "logit_bias['9']: "),
    ({"logit_bias": {"4000000": 1}}, "logit_bias: token id 4000000 is not in"),
    ({"logit_bias": {str(at): 1 for at in range(1025)}}, "logit_bias"),
    ({"stop_token_ids": [4000000]}, "stop_token_ids: token id 4000000 is not in"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
    ({"top_logprobs": 2}, "only allowed when logprobs is true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": {"type": "xml"}}, "type is 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "json_schema.schema is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}}, "schema"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}}, "is not allowed with"),
    ({"structured_outputs": {}}, "set one of json"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "mutually exclusive"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex is empty"),
    ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "mutually exclusive"),
    ({"guided_json": "{"}, "guided_json is not valid JSON"),
    ({"guided_json": "[]"}, "guided_json must be a JSON object"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_decoding_backend": "x"}, "guided_decoding_backend is not supported"),
    ({"echo": True}, "echo is not supported"),
    ({"n": 129}, "n: Input should be less than or equal to 128"),
    ({"best_of": 2}, "best_of must be 1"),
    ({"tools": [WEATHER, WEATHER]}, "two functions have the same name"),
    ({"tools": [{"type": "search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "odd": 1}}]}, "tools[0].function.odd"),
    ({"tools": [TIME] * 129}, "tools"),
    ({"tool_choice": "required"}, "the request has no tools"),
    ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "'other'"),
    ({"tools": [TIME], "tool_choice": "always"}, "tool_choice: Input should be 'none', 'auto' or 'required' or an"),
    ({"tools": [TIME], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type: Input should be 'function'"),
    ({"stop": 5}, "stop: Input should be a valid string or a valid array"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]: Input should be an object"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "content[0].text: Input should be a"),
    ({"tools": [TIME], "tool_choice": "required", "response_format": {"type": "json_object"}}, "mutually exclusive"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id is missing"),
    ({"messages": [{**GREETING, "tool_calls": [CALL]}]}, "requires the role assistant"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content is missing"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs.bos_token"),
]
EMBEDDINGS: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": ""}, "the input is empty"),
    ({"input": []}, "input"),
    ({"input": [""]}, "the input is empty"),
    ({"input": [[]]}, "input"),
    ({"input": [1, "a"]}, "input"),
    ({"input": [10**6]}, "token id 1000000"),
    ({"input": ["a"] * (INPUTS_MAX + 1)}, "input"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "dimensions": 8}, "does not support dimensions"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "stream": True}, "unknown parameter 'stream'"),
    ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not supported"),
    ({"input": "a", "nvext": {"annotations": ["query_instance_id"]}}, "no annotations"),
]
TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "n": 0}, "n: "),
    ({"prompt": "a", "n": 129}, "n: "),
    ({"prompt": ["a"] * 100, "n": 100}, f"limit of {CHOICES_MAX:,} choices"),
    ({"prompt": ["a"] * (CHOICES_MAX + 1)}, "prompt"),
    ({"prompt": ["a", ""]}, "the prompt is empty"),
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt[1]: Input should be a valid string"),
    ({"prompt": [1, 2, "a", 4]}, "prompt[2]: Input should be a valid integer"),
    ({"prompt": [1, 2, -1]}, "prompt[2]: Input should be greater than or equal to 0"),
    ({"prompt": [5] * 90_000, "n": 100}, "9,000,000 prompt tokens"),
    ({"prompt": "a", "echo": True, "logprobs": 1}, "echo is not supported together with logprobs"),
]
QUERIES = [
    ({"model": NAME}, 400, "invalid_value"),
    ({"model": "gpt", "prompt": "a"}, 404, "model_not_found"),
    ({"model": NAME, "prompt": ""}, 400, "empty_prompt"),
    ({"model": NAME, "prompt": ["a", "b"]}, 400, "unsupported_parameter"),
    ({"model": NAME, "prompt": "a", "messages": HELLO}, 400, "unknown_parameter"),
    ({"model": NAME, "prompt": "a", "max_tokens": 10**9}, 400, "context_length_exceeded"),
    (b"{", 400, "invalid_json"),
    (b"[" * 5_000, 400, "invalid_json"),
    (b"x" * 300_000, 413, "body_too_large"),
]
TOKENIZATION = [
    ("/tokenize", {}, 400, "neither messages nor a prompt"),
    ("/tokenize", {"prompt": ["a", "b"]}, 400, "one request per prompt"),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404, "unknown model"),
    ("/tokenize", {"prompt": "a", "color": 1}, 400, "unknown parameter 'color'"),
    ("/tokenize", {"messages": [GREETING], "documents": [{}]}, 400, "documents"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": [10**6]}, 400, "token id 1000000"),
    ("/detokenize", {"tokens": [1], "model": "other"}, 404, "unknown model"),
]
HINTS = [
    ({"router": {"router_temperature": -0.1}}, "router.router_temperature", INVALID),
    ({"router": {"prefill_load_scale": float("nan")}}, "router.prefill_load_scale", INVALID),
    ({"router": {"overlap_score_credit": float("inf")}}, "router.overlap_score_credit", INVALID),
    ({"router": {"mode": "psychic"}}, "router.mode", INVALID),
    ({"router": {"ttft_target": -1}}, "router.ttft_target", INVALID),
    ({"router": {"itl_target": 1e10}}, "router.itl_target", INVALID),
    ({"router": {"shared_cache_multiplier": 1}}, "router.shared_cache_multiplier", UNSUPPORTED),
    ({"router": {"mode": "direct"}}, "router.mode", OPPOSED),
    ({"dp_rank": 0}, "dp_rank", OPPOSED),
    ({"dp_rank": -1}, "dp_rank", INVALID),
    ({"backend_instance_id": 1, "decode_worker_id": 2}, "decode_worker_id", OPPOSED),
    ({"backend_instance_id": True}, "backend_instance_id", INVALID),
    ({"backend_instance_id": 1 << 64}, "backend_instance_id", INVALID),
    ({"backend_instance_id": ""}, "backend_instance_id", INVALID),
    ({"backend_instance_id": "w1", WHERE: {"allowed_worker_ids": ["w2"]}}, f"{WHERE}.allowed_worker_ids", OPPOSED),
    ({WHERE: {"allowed_worker_ids": []}}, f"{WHERE}.allowed_worker_ids", INVALID),
    ({WHERE: {"preferred_taints": {"a": float("nan")}}}, f"{WHERE}.preferred_taints.a", INVALID),
    ({WHERE: {"required_taints": ["t"] * 65}}, f"{WHERE}.required_taints", INVALID),
    ({WHERE: {"forbidden": []}}, f"{WHERE}.forbidden", "unknown_parameter"),
    ({"agent_hints": {"priority": 1 << 31}}, "agent_hints.priority", INVALID),
    ({"agent_hints": {"strict_priority": -1}}, "agent_hints.strict_priority", INVALID),
    ({"agent_hints": {"speculative_prefill": True}}, "agent_hints.speculative_prefill", UNSUPPORTED),
    ({"session_control": {}}, "session_control.session_id", INVALID),
    ({"session_control": {"session_id": "s", "action": "close"}}, "session_control.action", UNSUPPORTED),
    ({"agent_context": {"session_final": True}}, "agent_context.session_final", UNSUPPORTED),
    ({"prefill_worker_id": 3}, "prefill_worker_id", UNSUPPORTED),
    ({"token_data": [1]}, "token_data", UNSUPPORTED),
    ({"magic": 1}, "magic", "unknown_parameter"),
    ({"annotations": ["formatted_prompt"]}, "annotations", UNSUPPORTED),
    ({"extra_fields": ["timing"]}, "extra_fields", UNSUPPORTED),
    ({"cache_salt": 5}, "cache_salt", INVALID),
    ({"cache_control": {}}, "cache_control.type", INVALID),
    ({"cache_control": {"type": "eternal"}}, "cache_control.type", INVALID),
    *(
        ({"cache_control": {"type": "ephemeral", "ttl": ttl}}, "cache_control.ttl", INVALID)
        for ttl in ("61m", "2h", "0s", "5", "5d", "-5m", "5m\n", "\u0665m", 300, "99999s")
    ),
    ({"cache_control": {"type": "ephemeral", "scope": "x"}}, "cache_control.scope", "unknown_parameter"),
    ([], "", INVALID),
]
COMMANDS = [
    ("/v1/commands", {"action": "dream"}, "action", "unknown_command"),
    ("/v1/commands", {}, "action", INVALID),
    ("/v1/commands", {"action": "load_lora"}, "lora_name", INVALID),
    ("/v1/commands", {"action": "sleep", "deep": 1}, "deep", "unknown_parameter"),
    ("/v1/loras", {"lora_path": "/x"}, "lora_name", INVALID),
    ("/v1/loras", {"lora_name": "x"}, "lora_path", INVALID),
    ("/v1/loras", {"lora_name": "x" * 257, "lora_path": "/x"}, "lora_name", INVALID),
    ("/v1/loras", {"lora_name": "x", "lora_path": "/" * 4097}, "lora_path", INVALID),
    ("/v1/loras", {"lora_name": "x", "source": {"uri": "gs://bucket/x"}}, "source.uri", INVALID),
    ("/v1/loras", {"lora_name": "x", "source": {"uri": "s3:///x"}}, "source.uri", INVALID),
    ("/v1/loras", {"lora_name": "x", "lora_path": "gs://bucket/x"}, "lora_path", INVALID),
    ("/v1/loras", {**LORA, "lora_digest": "abc"}, "lora_digest", INVALID),
    ("/v1/loras", {**LORA, "placement": "here"}, "placement", INVALID),
    ("/v1/loras", {**LORA, "placement": "auto", "worker_ids": ["a"]}, "placement", INVALID),
    ("/v1/loras", {"lora_name": "x", "source": {"uri": "file://host/x"}}, "source.uri", INVALID),
    ("/v1/loras", {"lora_name": "x", "source": {"uri": "file://[/x"}}, "source.uri", INVALID),
    ("/v1/loras", {"lora_name": "x", "source": {"url": "/"}}, "source.uri", INVALID),
    ("/v1/load_lora_adapter", {**LORA, "load_inplace": True}, "load_inplace", "unsupported_parameter"),
    ("/sleep", {"level": 3}, "level", INVALID),
    ("/sleep?level=deep", None, "level", INVALID),
    ("/pause?mode=abort", None, "mode", "unknown_parameter"),
    ("/pause", {"timeout_s": 0}, "timeout_s", INVALID),
    ("/pause", {"timeout_s": 3601}, "timeout_s", INVALID),
    ("/pause", {"worker_ids": [""]}, "worker_ids[0]", INVALID),
    ("/pause", {"worker_ids": ["w"] * 1025}, "worker_ids", INVALID),
    ("/pause", b"[1]", None, INVALID),
    ("/pause", b"{", None, "invalid_json"),
]
SETTINGS = [
    (BUSY, {"model": "gpt", DECODE: 0.5}, 404, "model", "model_not_found"),
    (BUSY, {DECODE: 0.5}, 400, "model", INVALID),
    (BUSY, {"model": NAME, DECODE: 1.5}, 400, DECODE, INVALID),
    (BUSY, {"model": NAME, DECODE: -0.1}, 400, DECODE, INVALID),
    (BUSY, {"model": NAME, PREFILL: 1.5}, 400, PREFILL, INVALID),
    (BUSY, {"model": NAME, PREFILL: 1 << 63}, 400, PREFILL, INVALID),
    (BUSY, {"model": NAME, SHARE: "1"}, 400, SHARE, INVALID),
    (BUSY, {"model": NAME, "threshold": 1}, 400, "threshold", "unknown_parameter"),
    (BUSY, b'{"model": "test-model", "active_prefill_tokens_threshold_frac": NaN}', 400, SHARE, INVALID),
    (BUSY, b"{", 400, None, "invalid_json"),
    (DISAGG, {"model": "gpt", "policy": "never"}, 404, "model", "model_not_found"),
    (DISAGG, {"model": NAME, "policy": "sometimes"}, 400, "policy", INVALID),
    (DISAGG, {"model": NAME, "max_local_prefill_length": -1}, 400, "max_local_prefill_length", INVALID),
    (DISAGG, {"model": NAME, "eff_isl_threshold": 1 << 63}, 400, "eff_isl_threshold", INVALID),
    (DISAGG, {"model": NAME, "eff_isl_ratio_threshold": 1.1}, 400, "eff_isl_ratio_threshold", INVALID),
    (DISAGG, {"model": NAME, "decode_busy_threshold": 1.1}, 400, "decode_busy_threshold", INVALID),
    (DISAGG, {"model": NAME, "max_prefill_queue_size": 0}, 400, "max_prefill_queue_size", INVALID),
    (DISAGG, {"model": NAME, "enforce": "yes"}, 400, "enforce", INVALID),
    (DISAGG, {"model": NAME, "limit": 1}, 400, "limit", "unknown_parameter"),
]
RULES: list[tuple[str, dict[str, Any], int, str, str, str]] = [
    ("drain", {"pool": "shot"}, 404, "pool", "unknown_pool", "unknown pool 'shot'; did you mean short?"),
    ("drain", {"pool": "foreign"}, 404, "pool", "unknown_pool", "pools are: answers, long, short"),
    ("canary", {"pool": "x", "base": "short"}, 404, "pool", "unknown_pool", ""),
    ("canary", {"pool": "long", "base": "shot"}, 404, "base", "unknown_pool", ""),
    ("canary", {"pool": "long", "base": "long"}, 400, "base", INVALID, ""),
    ("canary", {"pool": "long", "base": "short", "share": 1.5}, 400, "share", INVALID, ""),
    ("canary", {"pool": "long", "basis": "short"}, 400, "basis", "unknown_parameter", ""),
    ("policy", {"pool": "shot", "mode": "kv"}, 404, "pool", "unknown_pool", ""),
    ("policy", {"pool": "short", "mode": "round"}, 404, "mode", "unknown_policy", "did you mean round-robin?"),
    ("policy", {"pool": "short", "mode": "their.Policy"}, 404, "mode", "unknown_policy", "with --allow-policy"),
    ("policy", {"pool": "short"}, 400, "mode", INVALID, ""),
    ("drain", {"pool": "short", "operator": "x" * 257}, 400, "operator", INVALID, ""),
    ("drain", {"pool": "short", "operator": "a\n"}, 400, "operator", INVALID, ""),
    ("drain", {"pool": ""}, 400, "pool", INVALID, ""),
    ("drain", {"model": "gpt", "pool": "short"}, 404, "model", "model_not_found", ""),
    ("routing", routing(role="decode"), 404, "grids[0].pools", "unknown_pool", "unknown decode pool 'short'"),
    ("routing", routing(isl_max=0), 400, "grids", INVALID, "grids[0]: isl_max is 0; it must be above isl_min"),
    ("routing", routing(cells=[["short"], ["lng"]]), 400, "grids", INVALID, "grids[0]: the pool 'lng' of"),
    ("routing", routing(isl_mx=5), 400, "grids", INVALID, "grids[0]: unknown parameter 'isl_mx'; did you"),
    ("routing", {"grids": [GRID, GRID]}, 400, "grids", INVALID, "duplicate grid for the role aggregated"),
]
NAMES = [NAME, "../x", "a/../b", "/etc/passwd", "a\0b", "a\nb", " sql", "sql ", "\x1b[2J", "x" * 257]
ANY = "any"
CASES: list[tuple[str, Any, int, str, str | None, str]] = [  # path, body, status, code, param and a part of the message
    *((path, body, status, code, ANY, says) for path, body, status, code, says in BODIES),
    *((CHAT, chat(**changes), 400, ANY, ANY, says) for changes, says in CHATS),
    *((EMBED, {"model": NAME, **fields}, 400, ANY, ANY, says) for fields, says in EMBEDDINGS),
    *((TEXT, {"model": NAME, **fields}, 400, ANY, ANY, says) for fields, says in TEXTS),
    *((ROUTE, body, status, code, ANY, "") for body, status, code in QUERIES),
    *((path, body, status, ANY, ANY, says) for path, body, status, says in TOKENIZATION),
    *((path, {"model": NAME, **body}, 400, "unknown_parameter", ANY, "color") for path, body in UNKNOWN),
    *((CHAT, chat(nvext=hints), 400, code, f"nvext.{param}".rstrip("."), "") for hints, param, code in HINTS),
    *((path, body, 400, code, param, "") for path, body, param, code in COMMANDS),
    *((path, body, status, code, param, "") for path, body, status, param, code in SETTINGS),
    *(
        (f"/v1/pools/{rule}", {"model": NAME, **body}, status, code, param, says)
        for rule, body, status, param, code, says in RULES
    ),
    *(
        (path, {**LORA, **action, "lora_name": name}, 400, ANY, "lora_name", "")
        for path, action in (("/v1/loras", {}), ("/v1/commands", {"action": "load_lora"}))
        for name in NAMES
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_scene() -> AsyncIterator[Scene]:
    async with make_scene(admin_token=ADMIN_TOKEN, routing_hints=True) as made:
        for pool, model, role in POOLS:
            disagg = DisaggConfig(policy="classic") if role == "decode" else DisaggConfig()
            router = RouterConfig(disagg=disagg)
            made.control(PoolConfigured(pool=pool, model=model, block_size=4, router=router, role=role))
        yield made


@MODULE_LOOP
@pytest.mark.parametrize(("path", "body", "status", "code", "param", "says"), CASES)
async def test_invalid_bodies_are_rejected_by_name_and_change_nothing(
    shared_scene: Scene, path: str, body: Any, status: int, code: str, param: str | None, says: str
) -> None:
    if not isinstance(body, bytes):
        body = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()  # unlike httpx, it writes NaN
    before = shared_scene.refusals()
    response = await shared_scene.client.post(path, content=body)
    assert response.status_code == status, response.text
    found = response.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    assert code in (found["code"], ANY)
    assert param in (found["param"], ANY)
    assert says in found["message"]
    assert found["message"].isprintable()
    assert shared_scene.refusals() - before == {found["code"]: 1}
    assert shared_scene.requests() == []
    assert len(shared_scene.events(CONTROL)) == len(POOLS)


PLAIN = json.dumps({"prompt": "a"}).encode()
zipped = functools.partial(gzip.compress, mtime=0)  # names of tests contain the result
ZIPPED = zipped(PLAIN)
LARGE = b'{"prompt": "' + b"a" * (1 << 21)  # above the limits of both routes
ENCODINGS: list[tuple[str, bytes, int, str]] = [
    *((coding, ZIPPED, 200, "") for coding in ("gzip", "GZIP", "x-gzip")),
    ("identity", PLAIN, 200, ""),
    ("", BOM + PLAIN, 200, ""),
    ("gzip", zipped(BOM + PLAIN), 200, ""),
    ("gzip", b"".join(zipped(PLAIN[at : at + 1]) for at in range(len(PLAIN))) + zipped(b""), 200, ""),
    *(("gzip", raw, 400, "invalid_encoding") for raw in (PLAIN, ZIPPED[:-1], ZIPPED + b"x", b"")),
    *(("gzip", raw, 413, "body_too_large") for raw in (zipped(LARGE), zipped(b"") * (1 << 17))),
    *((coding, ZIPPED, 415, "unsupported_content_encoding") for coding in ("br", "zstd", "gzip, gzip", "utf-8")),
    *(("", PLAIN.decode().encode(charset), 400, "invalid_json") for charset in ("utf-16", "utf-16-be", "utf-32")),
]


@MODULE_LOOP
@pytest.mark.parametrize(("coding", "raw", "status", "code"), ENCODINGS)
@pytest.mark.parametrize("path", ["/tokenize", BUSY])
async def test_encoded_bodies(shared_scene: Scene, path: str, coding: str, raw: bytes, status: int, code: str) -> None:
    if path == BUSY and status == 200:
        status, code = 400, INVALID  # the body has no `model`
    headers = {"content-encoding": coding} if coding else {}
    response = await shared_scene.client.post(path, content=raw, headers=headers)
    found = response.json().get("error", {})
    assert (response.status_code, found.get("code", "")) == (status, code)
    assert response.headers.get("accept-encoding") == ("gzip" if status == 415 else None)
    if code == "invalid_json":
        assert "UTF-8" in found["message"]


async def test_a_declared_length_beyond_64_bits_is_too_large(scene: Scene) -> None:
    response = await scene.client.post(CHAT, content=b"{}", headers={"content-length": "9" * 5_000})
    assert response.status_code == 413


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        *("model", "messages", "prompt", "max_tokens", "temperature", "stop", "stream", "seed", "n"),
        *("stream_options", "nvext", "cache_salt", "odd"),
    ]
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing_scene() -> AsyncIterator[Scene]:
    """Yield a scene that rejects valid bodies, too."""
    async with make_scene(timeout_s=0.000_001) as made:
        made.group.submit = _refuse_all  # type: ignore[method-assign]
        yield made


@MODULE_LOOP
@examples(1.5)
@given(body=st.dictionaries(FIELDS, JSON, max_size=6), path=st.sampled_from([CHAT, TEXT]))
async def test_random_bodies_get_a_4xx(refusing_scene: Scene, body: dict[str, Any], path: str) -> None:
    body.setdefault("model", NAME)
    response = await refusing_scene.client.post(path, content=json.dumps(body).encode())
    assert 400 <= response.status_code < 500, response.text
    assert response.json()["error"]["code"]


@MODULE_LOOP
@given(raw=st.binary(max_size=64))
async def test_random_bytes_get_a_4xx(refusing_scene: Scene, raw: bytes) -> None:
    response = await refusing_scene.client.post(CHAT, content=raw)
    assert 400 <= response.status_code < 500, response.text


async def _refuse_all(event: RequestSubmitted, stream: object = None) -> Stream:
    raise ApiError(418, "valid", "the body was valid")


PARTS = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
FUNCTION = {"type": "function", "function": {"name": "f"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
ROUTED = {"allowed_worker_ids": ["w", 1], "preferred_taints": {"a": 1}}
VALID: list[tuple[type[Body], dict[str, Any]]] = [
    (ChatBody, message(content=PARTS, name="ann")),
    (ChatBody, chat(messages=[{"role": "assistant", "tool_calls": [CALL]}], tools=[WEATHER], stop=["a", "b"])),
    (ChatBody, chat(tools=[FUNCTION], tool_choice=FUNCTION, metadata={"a": [1]}, chat_template_kwargs={"a": [1]})),
    (ChatBody, chat(response_format=FORMAT, stream=True, stream_options={"include_usage": True}, stop="a")),
    (ChatBody, chat(structured_outputs={"json": SCHEMA}, logit_bias={"1": 2}, nvext={WHERE: ROUTED})),
    *((TextBody, {"model": NAME, "prompt": prompt}) for prompt in ("a", [1, 2, 3], ["a", "b"], [[1], [2, 3]])),
    *((EmbeddingBody, {"model": NAME, "input": given}) for given in ("a", [1, 2, 3], ["a", "b"], [[1], [2, 3]])),
]


def places(value: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the path, the container and the key of each value in a body."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        where = f"{path}.{key}".lstrip(".") if str(key).isidentifier() else f"{path}[{key!r}]"
        yield where, value, key
        yield from places(value[key], where)


@pytest.mark.parametrize("wrong", [{"odd": [0.5]}, [None], 0.5, "", float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize(("kind", "body"), VALID)
def test_an_error_names_the_value_that_was_changed(kind: type[Body], body: dict[str, Any], wrong: Any) -> None:
    """Also if a value may have one of several types, and in JSON of any form, such as a schema."""
    parse(kind, json.dumps(body).encode())
    for at in range(len([*places(body)])):
        changed = json.loads(json.dumps(body))
        where, parent, key = [*places(changed)][at]
        parent[key] = wrong
        try:
            parse(kind, json.dumps(changed).encode())
        except ApiError as found:
            param = found.param or ""
            assert where.startswith(param) or param.startswith(where), (where, found.message)
        else:
            assert not isinstance(wrong, float) or isfinite(wrong), where


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (ChatBody, "messages", [{"role": "user", "content": [5]}] * 5_000),
        (ChatBody, "tools", [{}] * 100),
        (ChatBody, "stop", [0.5] * 5_000),
        (ChatBody, "messages", [{"role": "user", "content": [0.5] * 5_000}]),
        (ChatBody, "logit_bias", {str(at): "x" for at in range(5_000)}),
        (ChatBody, "nvext", {"routing_constraints": {"preferred_taints": {str(at): "x" for at in range(5_000)}}}),
        (TextBody, "prompt", [0.5] * 5_000),
        (EmbeddingBody, "input", [0.5] * 5_000),
        (EmbeddingBody, "input", ["a"] * 2_000 + [1]),
        (EmbeddingBody, "input", [[0.5] * 5_000]),
        (EmbeddingBody, "input", [[0.5]] * 2_000),
    ],
)
def test_validation_stops_at_the_first_of_many_errors(kind: type[Body], field: str, value: Any) -> None:
    """Each error takes a kilobyte, so a large hostile body would exhaust the memory."""
    whole = {"model": NAME, "messages": HELLO, "prompt": "x", "input": "x", field: value}
    fields = {name: given for name, given in whole.items() if name in kind.model_fields}
    with pytest.raises(ValidationError) as refused:
        kind.model_validate_json(json.dumps(fields))
    assert refused.value.error_count() < 10


@pytest.mark.parametrize("template", ["{{ 1 // n }}", "{{ [1][n + 1] + 1 }}", "{{ range(9 ** 9 + n) }}"])
async def test_arguments_that_break_a_template_are_rejected(template: str, tmp_path: Path) -> None:
    """Otherwise the Kafka API would read such a record again and again."""
    model = Model(media_model.make(tmp_path, template))
    async with make_scene(model) as scene:
        reply = await scene.client.post(CHAT, json=chat(chat_template_kwargs={"n": 0}))
    assert reply.status_code == 400
    assert "chat template rejects" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("path", "field"), [(TEXT, "prompt"), (EMBED, "input")])
async def test_a_prompt_beyond_the_context_is_rejected_before_it_is_hashed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    """Hashing millions of tokens would block the event loop."""
    monkeypatch.setattr("forebay.ingress.prepare.sequence_hashes", lambda *_: 1 // 0)
    scene.model.context_tokens = 8
    reply = await scene.client.post(path, json={"model": NAME, field: [1] * 9})
    assert error(reply) == (400, "context_length_exceeded")
    assert reply.json()["error"]["param"] == field


@pytest.mark.parametrize("body", [chat(model="x" * 100_000), chat(**{"x" * 100_000: 1})])
async def test_long_values_are_truncated_in_errors(scene: Scene, body: dict[str, Any]) -> None:
    reply = await scene.client.post(CHAT, json=body)
    assert reply.status_code in (400, 404)
    assert len(reply.content) < 5_000


async def test_unknown_fields_may_be_ignored() -> None:
    async with make_scene(ignore_unknown_fields=True) as lenient:
        for path, body in UNKNOWN:
            pending = lenient.start(path, {"model": NAME, **body})
            lenient.refuse((await lenient.next_request()).request_id, 503, "queue_timeout")
            assert error(await pending) == (503, "queue_timeout")


async def test_unsupported_values_are_rejected_even_if_unknown_fields_are_ignored() -> None:
    async with make_scene(ignore_unknown_fields=True) as lenient:
        for body in ({"prompt": "a", "best_of": 2}, {"prompt": "a", "n": 0}):
            response = await lenient.client.post(TEXT, json={"model": NAME, **body})
            assert response.status_code == 400


async def test_the_kafka_api_ignores_unknown_fields_and_a_byte_order_mark(scene: Scene) -> None:
    value = BOM + msgspec.json.encode({"model": NAME, "messages": [GREETING], "color": 1})
    record = Record("openai-requests", 0, 0, 0, value)
    with pytest.raises(ApiError, match="unknown parameter 'color'"):
        body_of(record, scene.front.bodies.limits)
    assert body_of(record, scene.front.bodies.limits, ignores_unknown=True).model == NAME


REQUIRED: dict[type[Body], dict[str, Any]] = {
    ChatBody: {"model": NAME, "messages": [GREETING]},
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


def test_every_field_of_messages_and_tools_reaches_the_chat_template(tmp_path: Path) -> None:
    """No accepted field is dropped: neither that of a message of any role, nor that of a call or a tool."""
    model = Model(media_model.make(tmp_path, "{{ messages | tojson }}{{ tools | tojson }}"))
    given: dict[str, Any] = {"name": "the-name", "content": "the-content", "tool_call_id": "the-id"}
    called = {"id": "the-call", "type": "function", "function": {"name": "the-called", "arguments": '{"a": "the-b"}'}}
    given |= {"tool_calls": [called], "reasoning_content": "the-reasoning", "reasoning": "the-reasoning"}
    assert given.keys() | {"role"} == Message.model_fields.keys()
    function = {"name": "the-function", "description": "the-use", "parameters": {"a": "the-schema"}}
    assert function.keys() == Function.model_fields.keys()
    of_roles = {"tool": {"tool_call_id"}, "assistant": {"tool_calls", "reasoning_content", "reasoning"}}
    for role in ("system", "developer", "user", "assistant", "tool"):
        sent = {name: given[name] for name in {"name", "content"} | of_roles.get(role, set())}
        raw = json.dumps(chat(messages=[{"role": role, **sent}], tools=[{"type": "function", "function": function}]))
        body = parse(ChatBody, raw.encode())
        output = model.render(body.chat(), body.choice.plain())
        assert {*re.findall("the-[a-z]+", raw)} <= {*re.findall("the-[a-z]+", output)}


def test_every_accepted_field_is_documented() -> None:
    """The pages say of each field whether it has an effect."""
    folder = Path(__file__).parents[2] / "docs"
    pages = "".join((folder / name).read_text() for name in ("openai.md", "routing.md", "multimodal.md", "kv-tiers.md"))
    for kind in parts_of(ChatBody) | parts_of(TextBody) | parts_of(EmbeddingBody):
        for name in {field.alias or name for name, field in kind.model_fields.items()} | kind.ignored:
            assert re.search(rf"`[^`]*\b{name}\b[^`]*`", pages), (kind, name)


def parts_of(kind: type[Body]) -> set[type[Body]]:
    """Return the class of a body and those of all of its parts."""
    inner = {one for field in kind.model_fields.values() for one in found_in(field.annotation)}
    return {kind}.union(*(parts_of(one) for one in inner))


def found_in(annotation: Any) -> set[type[Body]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return {annotation}
    return set().union(*(found_in(one) for one in get_args(annotation)))


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
