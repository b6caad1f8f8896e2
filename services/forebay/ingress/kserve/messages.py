"""Messages of the Open Inference Protocol, with Triton's `ModelStreamInfer`. Source: `grpc_service.proto` of Triton."""

from typing import Any

from forebay.runtime.protobuf import DOUBLE, FLOAT, INT64, UINT32, UINT64, message_classes

SERVICE = "inference.GRPCInferenceService"
_CONTENTS = {"bool": bool, "int": int, "int64": INT64, "uint": UINT32, "uint64": UINT64, "fp32": FLOAT, "fp64": DOUBLE}
_PARAMETERS = {"bool": bool, "int64": INT64, "string": str, "double": DOUBLE, "uint64": UINT64}

# The fields of each message in the order of their numbers, which begin at 1.
_FIELDS: dict[str, dict[str, Any]] = {
    "Empty": {},
    "Live": {"live": bool},
    "Ready": {"ready": bool},
    "ServerMetadata": {"name": str, "version": str},
    "ModelRequest": {"name": str, "version": str},
    "Tensor": {"name": str, "datatype": str, "shape": [INT64]},
    "ModelMetadata": {"name": str, "versions": [str], "platform": str, "inputs": ["Tensor"], "outputs": ["Tensor"]},
    "Parameter": {f"{name}_param": kind for name, kind in _PARAMETERS.items()},
    "Entry": {"key": str, "value": "Parameter"},
    "Contents": {f"{name}_contents": [kind] for name, kind in (_CONTENTS | {"bytes": bytes}).items()},
    "Input": {"name": str, "datatype": str, "shape": [INT64], "parameters": ["Entry"], "contents": "Contents"},
    "Output": {"name": str, "parameters": ["Entry"]},
    "ModelInferRequest": {
        "model_name": str,
        "model_version": str,
        "id": str,
        "parameters": ["Entry"],
        "inputs": ["Input"],
        "outputs": ["Output"],
        "raw_input_contents": [bytes],
    },
    "ModelInferResponse": {
        "model_name": str,
        "model_version": str,
        "id": str,
        "parameters": ["Entry"],
        "outputs": ["Tensor"],
        "raw_output_contents": [bytes],
    },
    "ModelStreamInferResponse": {"error_message": str, "infer_response": "ModelInferResponse"},
}
_NUMBERED = {
    name: {field: (number, kind) for number, (field, kind) in enumerate(fields.items(), 1)}
    for name, fields in _FIELDS.items()
}
CLASSES: dict[str, Any] = message_classes("forebay.kserve", _NUMBERED, unions=("Parameter",))
