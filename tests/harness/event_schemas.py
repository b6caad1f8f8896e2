"""Derive the JSON Schema of every topic and the page `docs/events.md` from the event types.

This module only builds values; `tests.harness.schemas` writes the files.
"""

import inspect
import json
from collections.abc import Iterator
from typing import Any

import msgspec

from forebay.events.descriptions import split_description
from forebay.events.topics import FIXED_TOPICS, Topic, work_topic

Schema = dict[str, Any]

TOPICS = (*FIXED_TOPICS, work_topic("<pool>"))
_REF = "#/$defs/"
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
# Meanings of fields that many events share, for events whose docstring does not describe them.
_MEANINGS = {
    "action": "what the workers are to do.",
    "actuator": "name of the actuator.",
    "at_us": "wall clock of the writer in microseconds.",
    "attempt": "attempt of the worker.",
    "block_size": "tokens per KV block.",
    "cached_tokens": "prompt tokens that were not computed.",
    "chunks": "number of chunks.",
    "command": "what the workers are to do.",
    "command_id": "id of the command.",
    "consumed": "what the owner applied since its previous record.",
    "core_version": "version of the decision rules.",
    "decision": "offset of the decision.",
    "dtype": "element type.",
    "due_us": "deadline in microseconds.",
    "engine": "name of the engine.",
    "engine_hashes": "the engine's own hashes, as packed u64; empty if they are the same.",
    "error": "what failed.",
    "first_offset": "offset of the first chunk on `snapshots`.",
    "group": "name of the group.",
    "incarnation": "incarnation of the ingress.",
    "ingress_id": "id of the ingress.",
    "journal_offset": "the state includes all journal records before this offset.",
    "kv_blocks_total": "KV blocks of the rank.",
    "kv_blocks_used": "KV blocks in use.",
    "lease_ttl_ms": "duration of the lease in milliseconds, for a later owner that does not find it; 0 if unknown.",
    "lora_name": "adapter; empty for none.",
    "message": "explanation for the caller.",
    "mode": "router mode, or the dotted path of a policy class.",
    "model": "name of the model.",
    "operator": "name of the operator; empty if unknown.",
    "output_tokens": "output tokens so far.",
    "owner_epoch": "epoch of the owner.",
    "owner_nonce": "random text in the owner's claim.",
    "planner_epoch": "epoch of the planner that wrote the record.",
    "pool": "name of the pool.",
    "prompt_tokens": "length of the prompt.",
    "rank": "rank of the worker.",
    "reason": "why this happened.",
    "reply_key": "key of the request, query or command, see the topic `tokens`.",
    "reply_slot": "partition of the topic `tokens` for the response.",
    "request_id": "id of the request.",
    "routing": "routing hints of the client.",
    "running": "requests that the engine is computing.",
    "sampling": "sampling parameters.",
    "seq": "sequence number.",
    "snapshot_id": "random text that all chunks of the snapshot have.",
    "terms": "cost of the rank, term by term.",
    "sequence_hashes": "hashes of the blocks, as packed u64.",
    "slot": "partition of the pool's work topic that the worker reads.",
    "spec": "capabilities and limits of the worker.",
    "stage": "stage to compute.",
    "store": "name of the shared store, as in `WorkerSpec.kv_store`.",
    "task": "whether to generate a response or an embedding.",
    "tier": "tier of the cache.",
    "waiting": "requests queued in the engine.",
    "worker_epoch": "epoch of the worker.",
    "worker_id": "id of the worker.",
}
_INTRODUCTION = """\
# Events

Generated from `schemas/forebay/events` by `make schemas`; do not edit.

Topic names are prefixed by the namespace: `<namespace>.requests`. Each event is a map with its tag in
`type`. Fields at their default are omitted. Readers ignore unknown fields and reject unknown tags.
New fields always have a default; a new meaning gets a new tag. Bytes are raw in msgpack and base64 in
JSON. Packed lists are little-endian: token ids as u32, hashes as u64. Times in `_us` are microseconds.
"""


def registry() -> dict[str, Schema]:
    """Return the JSON Schema (2020-12) of each topic that carries events.

    The key `work` covers the topics of all pools.
    """
    return {topic.name.partition(".")[0]: _schema(topic) for topic in TOPICS if topic.events is not None}


def document() -> str:
    """Return `docs/events.md`: all topics, events and parts as Markdown."""
    schemas = registry()
    events: list[str] = []
    parts: dict[str, list[str]] = {}
    for topic in TOPICS:
        schema = schemas.get(topic.name.partition(".")[0], {"$defs": {}})
        definitions = schema["$defs"]
        names = [name.removeprefix(_REF) for name in _alternatives(schema)]
        events += _topic_lines(topic)
        for name in names:
            events += _struct_lines(definitions[name], definitions)
        for name in definitions:
            # `control.pool_configured` is also part of a snapshot, but is described under its topic
            if name not in names and "." not in _heading(definitions[name]):
                parts[name] = _struct_lines(definitions[name], definitions)
    lines = [*events, "", "## Parts", "", "Groups of fields inside events."]
    for name in sorted(parts):
        lines += parts[name]
    return _INTRODUCTION + "\n".join(lines) + "\n"


def _schema(topic: Topic) -> Schema:
    about = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": topic.name,
        "description": f"{topic.description}; {topic.codec}, partitioned by {topic.partitioned_by}",
    }
    schema = about | msgspec.json.schema(topic.events)
    for definition in schema["$defs"].values():
        # the compiler strips docstring indentation since 3.13; the files must not depend on the version
        definition["description"] = inspect.cleandoc(definition["description"])
    return schema


def _alternatives(schema: Schema) -> Iterator[str]:
    if "$ref" in schema:
        yield schema["$ref"]
    for branch in schema.get("anyOf", ()):
        yield branch["$ref"]


def _topic_lines(topic: Topic) -> list[str]:
    facts = f"Codec: {topic.codec}. Partitioned by: {topic.partitioned_by}."
    return ["", f"## `{topic.name}`", "", f"{topic.description[0].upper()}{topic.description[1:]}. {facts}"]


def _struct_lines(schema: Schema, definitions: Schema) -> list[str]:
    text, meanings = split_description(schema["description"])
    lines = ["", f"### `{_heading(schema)}`", "", text, ""]
    required = schema.get("required", ())
    lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in schema["properties"].items():
        if name == "type":
            continue
        default = "required" if name in required else f"`{json.dumps(field['default'])}`"
        meaning = meanings.get(name, _MEANINGS.get(name, ""))
        lines.append(f"| `{name}` | {_type_text(field, definitions)} | {default} | {meaning} |")
    return lines


def _heading(schema: Schema) -> str:
    tag = schema["properties"].get("type")
    return str(tag["enum"][0] if tag else schema["title"])


def _type_text(schema: Schema, definitions: Schema) -> str:
    if "$ref" in schema:
        heading = _heading(definitions[schema["$ref"].removeprefix(_REF)])
        return f"[{heading}](#{heading.lower().replace('.', '')})"
    if "anyOf" in schema:
        return " or ".join(_type_text(branch, definitions) for branch in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "contentEncoding" in schema:
        return "bytes"
    if schema["type"] == "array":
        return f"list of {_type_text(schema['items'], definitions)}"
    bounds = [f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if key in schema]
    if "minLength" in schema:
        bounds.append(f"{schema['minLength']} to {schema['maxLength']} characters")
    if "pattern" in schema:
        bounds.append(f"`{schema['pattern']}`")
    return " ".join([schema["type"], *bounds])
