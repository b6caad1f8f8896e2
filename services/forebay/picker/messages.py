"""Messages of Envoy's external processor (`envoy.service.ext_proc.v3`), with the fields that the picker uses.

The package `xds-protos` has all of them, but it overwrites files of other packages.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from forebay.runtime.protobuf import Fields, message_classes

METHOD = "envoy.service.ext_proc.v3.ExternalProcessor", "Process"
FULL_DUPLEX = 4  # `ProcessingMode.BodySendMode`
OVERWRITE = 2  # `HeaderValueOption.HeaderAppendAction`

_FIELDS: Fields = {
    "Value": {"string_value": (3, str), "struct_value": (5, "Struct"), "list_value": (6, "List")},
    "List": {"values": (1, ["Value"])},
    "Struct": {"fields": (1, ["Entry"])},
    "Entry": {"key": (1, str), "value": (2, "Value")},
    "NamedStruct": {"key": (1, str), "value": (2, "Struct")},
    "Metadata": {"filter_metadata": (1, ["NamedStruct"])},
    "HeaderValue": {"key": (1, str), "value": (2, str), "raw_value": (3, bytes)},
    "HeaderMap": {"headers": (1, ["HeaderValue"])},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, bool)},
    "HttpBody": {"body": (1, bytes), "end_of_stream": (2, bool)},
    "Nothing": {},
    "Protocol": {"request_body_mode": (1, int), "response_body_mode": (2, int)},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "Nothing"),
        "response_trailers": (7, "Nothing"),
        "metadata_context": (8, "Metadata"),
        "attributes": (9, ["NamedStruct"]),
        "protocol_config": (11, "Protocol"),
    },
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, int)},
    "HeaderMutation": {"set_headers": (1, ["HeaderValueOption"]), "remove_headers": (2, [str])},
    "StreamedBody": {"body": (1, bytes), "end_of_stream": (2, bool)},
    "BodyMutation": {"streamed_response": (3, "StreamedBody")},
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, bool),
    },
    "Answer": {"response": (1, "CommonResponse")},
    "HttpStatus": {"code": (1, int)},
    "ImmediateResponse": {"status": (1, "HttpStatus"), "headers": (2, "HeaderMutation"), "body": (3, bytes)},
    "ProcessingResponse": {
        "request_headers": (1, "Answer"),
        "response_headers": (2, "Answer"),
        "request_body": (3, "Answer"),
        "response_body": (4, "Answer"),
        "request_trailers": (5, "Nothing"),
        "response_trailers": (6, "Nothing"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, "Struct"),
    },
}

_CLASSES = message_classes("forebay.picker", _FIELDS)
ProcessingRequest: Any = _CLASSES["ProcessingRequest"]
ProcessingResponse: Any = _CLASSES["ProcessingResponse"]


def headers_of(message: Any) -> dict[str, str]:
    """Return the headers in a message by lower-case name. Envoy fills in `raw_value`, or `value` in older versions."""
    found = message.headers.headers
    return {one.key.lower(): one.raw_value.decode("latin-1") or one.value for one in found}


def header_mutation(headers: Mapping[str, str], remove: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a change of headers. Envoy ignores `value`, so it gets `raw_value`."""
    values = ({"key": name, "raw_value": value.encode("latin-1", "replace")} for name, value in headers.items())
    return {
        "set_headers": [{"header": one, "append_action": OVERWRITE} for one in values],
        "remove_headers": list(remove),
    }


def body_parts(kind: str, body: bytes, *, is_last: bool, bytes_max: int = 62_000) -> Iterator[Any]:
    """Yield a body as parts of a stream, each of which is smaller than Envoy's limit of 64 KiB."""
    for at in range(0, max(len(body), 1), bytes_max):
        ends = is_last and at + bytes_max >= len(body)
        part = {"body": body[at : at + bytes_max], "end_of_stream": ends}
        yield ProcessingResponse(**{kind: {"response": {"body_mutation": {"streamed_response": part}}}})


def metadata(namespace: str, name: str, value: str) -> dict[str, Any]:
    """Return dynamic metadata with one value."""
    inner = {"fields": [{"key": name, "value": {"string_value": value}}]}
    return {"fields": [{"key": namespace, "value": {"struct_value": inner}}]}


def texts_of(structs: Any, namespace: str, name: str) -> list[str]:
    """Return the values of a field in attributes or metadata, which is a text with commas or a list of texts."""
    for struct in structs:
        for entry in struct.value.fields if struct.key == namespace else ():
            if entry.key == name:
                listed = [one.string_value for one in entry.value.list_value.values] or [entry.value.string_value]
                return [text.strip() for one in listed for text in one.split(",") if text.strip()]
    return []
