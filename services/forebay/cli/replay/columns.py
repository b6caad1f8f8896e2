"""DuckDB views of exported topics, with a column for every field that the topic's events may have."""

from typing import Any

from msgspec import inspect

from forebay.events.requests import RequestSubmitted
from forebay.events.topics import DECISIONS, INPUTS, Topic
from forebay.transport.readable import HEX_FIELDS

_PLACE = {"log_offset": "BIGINT", "log_partition": "BIGINT", "log_at_us": "BIGINT", "log_key": "VARCHAR"}
_INPUT_NAMES = {topic.name for topic in INPUTS}
_PLAIN: dict[type[inspect.Type], str] = {
    inspect.IntType: "BIGINT",
    inspect.FloatType: "DOUBLE",
    inspect.StrType: "VARCHAR",
    inspect.BoolType: "BOOLEAN",
    inspect.LiteralType: "VARCHAR",
    inspect.BytesType: "VARCHAR[]",
}


def view_of(name: str, topic: Topic | None, *, token_ids: bool) -> str:
    """Return the SQL statement that creates a view of an exported file. Run it in the export's directory."""
    columns = ", ".join(f"{_quoted(column)}: {_quoted(kind)}" for column, kind in _columns(topic, token_ids).items())
    view = name.replace("-", "_").replace(".", "_")
    options = f"format = 'newline_delimited', columns = {{{columns}}}"
    return f'CREATE OR REPLACE VIEW "{view}" AS FROM read_json({_quoted(name + ".ndjson")}, {options});\n'


def _columns(topic: Topic | None, token_ids: bool) -> dict[str, str]:
    columns = {**_PLACE, "log_headers": "JSON"}
    if topic is None or topic.events is None:
        return {**columns, "value": "VARCHAR"}
    if topic.name in _INPUT_NAMES:
        columns |= {"applied_us": "BIGINT", "applied_by": "BIGINT"}
    if topic.name == DECISIONS.name:
        columns["void"] = "BOOLEAN"
    columns |= {"undecodable": "VARCHAR", "value": "VARCHAR", "type": "VARCHAR"}
    type_info = inspect.type_info(topic.events)
    for event in type_info.types if isinstance(type_info, inspect.UnionType) else (type_info,):
        assert isinstance(event, inspect.StructType)
        if event.cls is RequestSubmitted:
            columns["prompt_tokens"] = "BIGINT"
        columns |= _fields(event, token_ids)
    return columns


def _fields(struct: inspect.StructType, token_ids: bool) -> dict[str, str]:
    columns = {}
    for field in struct.fields:
        if field.name == "token_ids":
            columns["token_ids" if token_ids else "token_count"] = "BIGINT[]" if token_ids else "BIGINT"
        elif field.name in HEX_FIELDS:
            columns[field.name] = "VARCHAR"
        else:
            columns[field.name] = _kind(field.type, token_ids)
    return columns


def _kind(type_info: inspect.Type, token_ids: bool) -> str:
    match type_info:
        case inspect.Metadata():
            return _kind(type_info.type, token_ids)
        case inspect.UnionType():
            (some, *others) = [one for one in type_info.types if not isinstance(one, inspect.NoneType)]
            return "JSON" if others else _kind(some, token_ids)
        case inspect.VarTupleType():
            return f"{_kind(type_info.item_type, token_ids)}[]"
        case inspect.StructType():
            fields = _fields(type_info, token_ids)
            return "STRUCT(" + ", ".join(f'"{name}" {kind}' for name, kind in fields.items()) + ")"
        case _:
            return _PLAIN[type(type_info)]


def _quoted(text: Any) -> str:
    return "'" + str(text).replace("'", "''") + "'"
