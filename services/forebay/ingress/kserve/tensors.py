"""Translate tensors of a request to a body of the completions API, and its response to tensors. Performs no I/O.

The names of the tensors are those of Triton's back ends for vLLM and TensorRT-LLM. As with these, the output begins
with the prompt unless `exclude_input_in_output` is set or the response is a stream.
"""

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from forebay.events.names import unknown_name
from forebay.ingress.errors import ApiError, invalid

VERSION = "1"  # of every model
# The format of an element in raw contents, and the field of typed contents.
DATATYPES = {
    "BOOL": ("?", "bool_contents"),
    "BYTES": ("", "bytes_contents"),
    "FP32": ("f", "fp32_contents"),
    "FP64": ("d", "fp64_contents"),
    "INT32": ("i", "int_contents"),
    "INT64": ("q", "int64_contents"),
    "UINT32": ("I", "uint_contents"),
    "UINT64": ("Q", "uint64_contents"),
}
TEXT, BOOL, FLOAT, INTEGER = ("BYTES",), ("BOOL",), ("FP32", "FP64"), ("INT32", "INT64", "UINT32", "UINT64")
FLOATS = "temperature top_p repetition_penalty presence_penalty frequency_penalty"
INTEGERS = "max_tokens min_tokens top_k seed"
# Of texts in `sampling_parameters`, as clients of Triton's back end for vLLM send them.
NUMBERS = frozenset(f"{FLOATS} {INTEGERS} min_p ignore_eos skip_special_tokens".split())
# Tensors and the name of the model set these fields.
SET_BY_TENSORS = frozenset({"echo", "model", "n", "prompt", "return_token_ids", "stream", "stream_options"})


class Input(NamedTuple):
    """Input tensor: accepted datatypes, the field of the body that it sets if any, whether it has several elements."""

    datatypes: tuple[str, ...]
    field: str = ""
    is_list: bool = False


INPUTS: Mapping[str, Input] = {
    "text_input": Input(TEXT, "prompt"),
    "input_ids": Input(INTEGER, "prompt", is_list=True),
    "input_lengths": Input(INTEGER),
    "stream": Input(BOOL, "stream"),
    "streaming": Input(BOOL, "stream"),
    "exclude_input_in_output": Input(BOOL),
    "sampling_parameters": Input(TEXT),
    **{name: Input(FLOAT, name) for name in FLOATS.split()},
    **{name: Input(INTEGER, name) for name in INTEGERS.split()},
    "request_output_len": Input(INTEGER, "max_tokens"),
    "min_length": Input(INTEGER, "min_tokens"),
    "runtime_top_k": Input(INTEGER, "top_k"),
    "runtime_top_p": Input(FLOAT, "top_p"),
    "random_seed": Input(INTEGER, "seed"),
    "stop_words": Input(TEXT, "stop", is_list=True),
    "end_id": Input(INTEGER, "stop_token_ids"),
    "pad_id": Input(INTEGER),
    "beam_width": Input(INTEGER),
    **{f"return_{name}": Input(BOOL) for name in ("finish_reason", "num_input_tokens", "num_output_tokens")},
}
OUTPUTS: Mapping[str, tuple[str, list[int]]] = {
    "text_output": ("BYTES", [1]),
    "finish_reason": ("BYTES", [1]),
    "num_input_tokens": ("UINT32", [1]),
    "num_output_tokens": ("UINT32", [1]),
    "output_ids": ("INT32", [1, 1, -1]),
    "sequence_length": ("INT32", [1, 1]),
}
OF_TOKENS = ("output_ids", "sequence_length")  # only of requests with `input_ids`


def described() -> dict[str, list[dict[str, Any]]]:
    """Return all tensors as fields of `ModelMetadata`."""
    inputs = {name: (one.datatypes[0], [-1 if one.is_list else 1]) for name, one in INPUTS.items()}

    def listed(tensors: Mapping[str, tuple[str, list[int]]]) -> list[dict[str, Any]]:
        return [{"name": name, "datatype": datatype, "shape": shape} for name, (datatype, shape) in tensors.items()]

    return {"inputs": listed(inputs), "outputs": listed(OUTPUTS)}


@dataclass(frozen=True, slots=True)
class Translated:
    """A request without its prompt, which is freed while the response is generated.

    Attributes:
        outputs: names of the output tensors of the response.
        echoed: token ids with which `output_ids` begins.
    """

    model_name: str
    request_id: str
    outputs: frozenset[str]
    echoed: list[int]

    def response(self, choice: Mapping[str, Any], found: Mapping[str, Any], **parameters: bool) -> dict[str, Any]:
        """Return the fields of the response with the output of a choice, of a whole response or of an event."""
        values: dict[str, Any] = {"text_output": choice["text"]}
        if (token_ids := choice.get("token_ids")) is not None:
            token_ids = self.echoed + token_ids
            values |= {"output_ids": token_ids, "sequence_length": len(token_ids)}
        if usage := found.get("usage"):
            values |= {"finish_reason": choice["finish_reason"], "num_input_tokens": usage["prompt_tokens"]}
            values["num_output_tokens"] = usage["completion_tokens"]
        outputs = [_encoded(name, value) for name, value in values.items() if name in self.outputs]
        return {
            "model_name": self.model_name,
            "model_version": VERSION,
            "id": self.request_id or found["id"],
            "parameters": [{"key": name, "value": {"bool_param": value}} for name, value in parameters.items()],
            "outputs": [tensor for tensor, _ in outputs],
            "raw_output_contents": [raw for _, raw in outputs],
        }


def _encoded(name: str, value: Any) -> tuple[dict[str, Any], bytes]:
    datatype, shape = OUTPUTS[name]
    if datatype == "BYTES":
        text = value.encode(errors="replace")
        raw = struct.pack("<I", len(text)) + text
    else:
        listed = value if isinstance(value, list) else [value]
        raw = struct.pack(f"<{len(listed)}{DATATYPES[datatype][0]}", *listed)
        shape = [len(listed) if dimension < 0 else dimension for dimension in shape]
    return {"name": name, "datatype": datatype, "shape": shape}, raw


def translate(request: Any, *, may_stream: bool) -> tuple[dict[str, Any], Translated]:
    """Return a `ModelInferRequest` as a body of the completions API. Raises ApiError for invalid tensors.

    The completions API checks the fields of the body.
    """
    if request.model_version not in ("", VERSION):
        text = unknown_name("version", request.model_version, [VERSION])
        raise ApiError(404, "model_not_found", f"model {request.model_name}: {text}", "model_version")
    values, body = _inputs(request), {"model": request.model_name}
    fields = [(INPUTS[name].field, [value] if name == "end_id" else value, name) for name, value in values.items()]
    fields += _parameters(request, values.get("sampling_parameters", "{}"))
    for field, value, name in fields:
        if field in body:
            raise invalid(f"{name} sets the field {field} of the completions API, which is already set", name)
        if field:
            body[field] = value
    if "prompt" not in body:
        raise invalid("the prompt is missing; send it as the tensor text_input or input_ids", "text_input")
    ids = body["prompt"] if "input_ids" in values else []
    if not 0 <= (length := values.get("input_lengths", len(ids))) <= len(ids):
        raise invalid(f"input_lengths is {length}, but input_ids has {len(ids)} elements", "input_lengths")
    if (width := values.get("beam_width", 1)) != 1:
        raise invalid(f"beam_width is {width}, but must be 1; beam search is not supported", "beam_width")
    streams, excludes = body.get("stream", False), values.get("exclude_input_in_output")
    if streams and not may_stream:
        raise invalid("stream: ModelInfer returns one response; use ModelStreamInfer for a stream", "stream")
    if streams and excludes is False:
        raise invalid("exclude_input_in_output is false, but a stream has no prompt", "exclude_input_in_output")
    echoes = not streams and not excludes
    body |= {"prompt": ids[:length] if ids else body["prompt"], "echo": echoes, "return_token_ids": bool(ids)}
    body["stream_options"] = {"include_usage": True} if streams else None
    outputs, echoed = _outputs(request, has_tokens=bool(ids)), ids[:length] if echoes else []
    return body, Translated(request.model_name, request.id, outputs, echoed)


def _parameters(request: Any, encoded: str) -> list[tuple[str, Any, str]]:
    """Return field, value and source of the parameters of a request and of the JSON in `sampling_parameters`."""
    name = "sampling_parameters"
    try:
        given = [(field, value, name) for field, value in msgspec.json.decode(encoded, type=dict[str, Any]).items()]
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"{name}: expected a JSON object ({error})", name) from error
    for entry in request.parameters:
        if entry.key != "triton_enable_empty_final_response":  # the final response is never empty
            kind = entry.value.WhichOneof("choice")
            given.append((entry.key, kind and getattr(entry.value, kind), "parameters"))
    for field, value, source in given:
        if field in SET_BY_TENSORS:
            raise invalid(f"{source} has {field}, which only tensors and the name of the model set", field)
        _require_finite(source, [value])
    return [(field, _number(value) if field in NUMBERS else value, source) for field, value, source in given]


def _number(value: Any) -> Any:
    """Return the number or boolean of a text. The completions API rejects other texts by name."""
    try:
        return msgspec.json.decode(value.lower(), type=int | float | bool) if isinstance(value, str) else value
    except msgspec.MsgspecError:
        return value


def _outputs(request: Any, *, has_tokens: bool) -> frozenset[str]:
    known = [name for name in OUTPUTS if has_tokens or name not in OF_TOKENS]
    for output in request.outputs:
        if output.name not in known:
            why = "; it requires input_ids" if output.name in OF_TOKENS else ""
            raise invalid(unknown_name("output", output.name, known) + why, output.name)
        _require_plain(output)
    return frozenset(output.name for output in request.outputs) or frozenset(known)


def _inputs(request: Any) -> dict[str, Any]:
    """Return the values of the input tensors by name."""
    raw, values = request.raw_input_contents, {}
    if raw and len(raw) != len(request.inputs):
        text = f"raw_input_contents has {len(raw)} elements for {len(request.inputs)} inputs; give one per input"
        raise invalid(text, "raw_input_contents")
    for at, tensor in enumerate(request.inputs):
        name, known = tensor.name, INPUTS.get(tensor.name)
        if known is None:
            raise invalid(unknown_name("input", name, INPUTS), name, "unsupported_parameter")
        if name in values or (raw and tensor.HasField("contents")):
            raise invalid(f"the input {name} is given twice; give it once, in contents or in raw_input_contents", name)
        _require_plain(tensor)
        elements = _elements(tensor, known, raw[at] if raw else None)
        values[name] = elements if known.is_list else elements[0]
    return values


def _require_plain(tensor: Any) -> None:
    if tensor.parameters:
        text = f"{tensor.name} has the parameter {tensor.parameters[0].key!r}; tensors with parameters, for example in "
        raise invalid(f"{text}shared memory, are not supported", tensor.name, "unsupported_parameter")


def _elements(tensor: Any, known: Input, raw: bytes | None) -> list[Any]:
    name, datatype, shape = tensor.name, tensor.datatype, list(tensor.shape)
    if datatype not in known.datatypes:
        raise invalid(f"the input {name} has datatype {datatype!r}; expected {' or '.join(known.datatypes)}", name)
    if len(shape) == 2 and shape[0] > 1:
        raise invalid(f"the input {name} is a batch of {shape[0]}; send one request per prompt", name)
    if shape[:-1] not in ([], [1]) or not shape or not 0 < shape[-1] <= (math.inf if known.is_list else 1):
        expected = "[n] or [1, n]" if known.is_list else "[1] or [1, 1]"
        raise invalid(f"the input {name} has shape {shape[:8]}; expected {expected}", name)
    form, field = DATATYPES[datatype]
    found = list(getattr(tensor.contents, field)) if raw is None else _decoded(name, form, raw)
    if len(found) != shape[-1]:
        where = field if raw is None else "raw_input_contents"
        raise invalid(f"the input {name} has shape {shape}, but {len(found)} elements in {where}", name)
    try:
        elements = [one.decode() for one in found] if datatype == "BYTES" else found
    except UnicodeDecodeError as error:
        raise invalid(f"the input {name} is not valid UTF-8: {error}", name) from error
    _require_finite(name, elements)
    return elements


def _require_finite(name: str, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(f"{name} has the value {value}; expected a finite number", name)


def _decoded(name: str, form: str, raw: bytes) -> list[Any]:
    """Return the elements in raw contents. Each text, which has no `form`, follows its length of four bytes."""
    if form:
        count, rest = divmod(len(raw), struct.calcsize(f"<{form}"))
        if not rest:
            return list(struct.unpack(f"<{count}{form}", raw))
    texts, at = [], 0
    while not form and at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        texts.append(raw[at + 4 : end])
        at = end
    if form or at != len(raw):
        raise invalid(f"the raw contents of the input {name} end inside of an element, after {len(raw)} bytes", name)
    return texts
