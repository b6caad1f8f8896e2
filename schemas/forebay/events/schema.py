"""The topics as JSON Schema and as a page for people, derived from the event types alone.

Only builds values; `tests/harness/schemas.py` writes them to files.
"""

import inspect
import json
from collections.abc import Iterator
from typing import Any

import msgspec

from forebay.events.topics import FIXED_TOPICS, Topic, work_topic

Schema = dict[str, Any]

TOPICS = (*FIXED_TOPICS, work_topic("<pool>"))
_REF = "#/$defs/"
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_INTRODUCTION = """\
# Events

Generated from `schemas/forebay/events` by `make schemas`; do not edit.

Topic names are prefixed by the namespace: `<namespace>.requests`. Each event is a map with its tag in
`type`. Fields that hold their default are left out. Readers ignore unknown fields and refuse unknown
tags. Fields are only ever added, with a default; a new meaning is a new tag. Bytes are raw in msgpack
and base64 in JSON; packed lists are little-endian, token ids as u32 and hashes as u64.
"""


def registry() -> dict[str, Schema]:
    """JSON Schema (2020-12) by file stem, one for each topic that carries events; `work` serves all pools."""
    return {topic.name.partition(".")[0]: _schema(topic) for topic in TOPICS if topic.events is not None}


def document() -> str:
    """All topics, events and parts as Markdown."""
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
            # `control.pool_configured` is part of a snapshot too, but has its place under its topic
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
        "description": f"{topic.says}; {topic.codec}, partitioned by {topic.partitioned_by}",
    }
    schema = about | msgspec.json.schema(topic.events)
    for definition in schema["$defs"].values():
        # the compiler takes docstring indentation away since 3.13; the files must not depend on that
        definition["description"] = inspect.cleandoc(definition["description"])
    return schema


def _alternatives(schema: Schema) -> Iterator[str]:
    if "$ref" in schema:
        yield schema["$ref"]
    for branch in schema.get("anyOf", ()):
        yield branch["$ref"]


def _topic_lines(topic: Topic) -> list[str]:
    facts = f"Codec: {topic.codec}. Partitioned by: {topic.partitioned_by}."
    return ["", f"## `{topic.name}`", "", f"{topic.says[0].upper()}{topic.says[1:]}. {facts}"]


def _struct_lines(schema: Schema, definitions: Schema) -> list[str]:
    lines = ["", f"### `{_heading(schema)}`", "", schema["description"], ""]
    required = schema.get("required", ())
    lines += ["| field | type | default |", "|---|---|---|"]
    for name, field in schema["properties"].items():
        if name == "type":
            continue
        default = "required" if name in required else f"`{json.dumps(field['default'])}`"
        lines.append(f"| `{name}` | {_type_text(field, definitions)} | {default} |")
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
