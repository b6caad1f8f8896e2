"""The official `tritonclient` for Python, by gRPC."""

import json
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.clients.checks import NAME
from tests.clients.conftest import KEY

HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def client(grpc_address: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(grpc_address) as made:
        yield made


def tensor(name: str, value: Any, datatype: str) -> triton.InferInput:
    kind: Any = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32}[datatype]
    array = np.array(value, dtype=kind)
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def text(value: str, **parameters: Any) -> list[triton.InferInput]:
    sampling = json.dumps({"temperature": "0", "max_tokens": "4", **parameters}).encode()
    return [tensor("text_input", [value.encode()], "BYTES"), tensor("sampling_parameters", [sampling], "BYTES")]


def test_the_server_and_its_model_are_described(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(NAME, headers=HEADERS)
    assert not client.is_model_ready("other", headers=HEADERS)
    assert client.get_server_metadata().name == "forebay"
    metadata = client.get_model_metadata(NAME, headers=HEADERS)
    inputs = {one.name: (one.datatype, list(one.shape)) for one in metadata.inputs}
    assert inputs["text_input"] == ("BYTES", [1])
    assert inputs["input_ids"] == ("INT32", [-1])
    assert "text_output" in [one.name for one in metadata.outputs]


def test_a_text_is_continued(client: triton.InferenceServerClient) -> None:
    whole = client.infer(NAME, text("Hello"), headers=HEADERS, request_id="mine")
    (output,) = whole.as_numpy("text_output")
    assert (output[:5], len(output.decode().split())) == (b"Hello", 5)
    assert whole.as_numpy("finish_reason").tolist() == [b"length"]
    assert whole.as_numpy("num_output_tokens").tolist() == [4]
    assert whole.get_response().id == "mine"
    excluding = [*text("Hello"), tensor("exclude_input_in_output", [True], "BOOL")]
    assert b"Hello" + client.infer(NAME, excluding, headers=HEADERS).as_numpy("text_output")[0] == output


def test_token_ids_are_continued(client: triton.InferenceServerClient) -> None:
    inputs = [
        tensor("input_ids", [[5, 6, 7]], "INT32"),
        tensor("input_lengths", [[3]], "INT32"),
        tensor("request_output_len", [[4]], "INT32"),
    ]
    names = ["output_ids", "sequence_length"]
    outputs = [triton.InferRequestedOutput(name) for name in names]
    result = client.infer(NAME, inputs, outputs=outputs, headers=HEADERS)
    assert result.as_numpy("output_ids").shape == (1, 1, 7)
    assert result.as_numpy("output_ids")[0, 0, :3].tolist() == [5, 6, 7]
    assert result.as_numpy("sequence_length").tolist() == [[7]]
    assert result.as_numpy("text_output") is None


def test_a_text_is_streamed(client: triton.InferenceServerClient) -> None:
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    whole = client.infer(NAME, text("Hello"), headers=HEADERS).as_numpy("text_output")[0]
    client.start_stream(lambda result, error: results.put((result, error)), headers=HEADERS)
    inputs = [*text("Hello"), tensor("stream", [True], "BOOL")]
    client.async_stream_infer(NAME, inputs, request_id="mine", enable_empty_final_response=True)
    parts = []
    while True:
        result, error = results.get(timeout=30)
        assert error is None
        parts.append(result.as_numpy("text_output")[0])
        assert result.get_response().id == "mine"
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.async_stream_infer(NAME, [tensor("text_input", [1], "INT32")])
    _, error = results.get(timeout=30)
    client.stop_stream()
    assert len(parts) == 5
    assert b"Hello" + b"".join(parts) == whole
    assert error.message() == "the input text_input has datatype 'INT32'; expected BYTES"


def test_errors_have_a_status(client: triton.InferenceServerClient) -> None:
    for name, inputs, headers, status in (
        (NAME, text("Hello"), {}, "StatusCode.UNAUTHENTICATED"),
        ("other", text("Hello"), HEADERS, "StatusCode.NOT_FOUND"),
        (NAME, text("Hello", temperature="high"), HEADERS, "StatusCode.INVALID_ARGUMENT"),
        (NAME, [*text("Hello"), tensor("stream", [True], "BOOL")], HEADERS, "StatusCode.INVALID_ARGUMENT"),
    ):
        with pytest.raises(triton.InferenceServerException) as raised:
            client.infer(name, inputs, headers=headers)
        assert raised.value.status() == status
