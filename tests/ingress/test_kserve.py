"""The KServe API: RPCs to an ingress become requests of the completions API. The test plays router and worker."""

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import trustme
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from forebay.ingress.errors import ApiError
from forebay.ingress.http.endpoint import Endpoint, TlsFiles
from forebay.ingress.kserve.messages import CLASSES, SERVICE
from forebay.ingress.kserve.server import build_server
from forebay.ingress.kserve.tensors import DATATYPES, INPUTS, translate
from forebay.runtime.errors import ConfigError
from tests.ingress.conftest import BODY_MAX, NAME, TEXT, Scene
from tests.ingress.conftest import text as text_body
from tests.ingress.keyed import key_of, keyed
from tests.system import until

Code = grpc.StatusCode
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]  # each channel has a connection of its own


class Client:
    """Methods of the service by name: `await client.call("ModelInfer", …)`."""

    def __init__(self, channel: grpc.aio.Channel, port: int) -> None:
        self._channel = channel
        self.port = port

    async def call(self, method: str, **fields: Any) -> Any:
        request, response = {
            "ModelInfer": ("ModelInferRequest", "ModelInferResponse"),
            "ModelMetadata": ("ModelRequest", "ModelMetadata"),
            "ModelReady": ("ModelRequest", "Ready"),
            "ServerReady": ("Empty", "Ready"),
        }[method]
        metadata = fields.pop("metadata", ())
        path = f"/{SERVICE}/{method}"
        rpc = self._channel.unary_unary(path, CLASSES[request].SerializeToString, CLASSES[response].FromString)
        return await rpc(CLASSES[request](**fields), metadata=metadata, timeout=20)

    def stream(self, metadata: Any = ()) -> Any:
        path, response = f"/{SERVICE}/ModelStreamInfer", CLASSES["ModelStreamInferResponse"]
        rpc = self._channel.stream_stream(
            path, CLASSES["ModelInferRequest"].SerializeToString, response_deserializer=response.FromString
        )
        return rpc(metadata=metadata, timeout=20)


@asynccontextmanager
async def serving(scene: Scene, tls: TlsFiles | None = None, root: bytes | None = None) -> AsyncIterator[Client]:
    probe, port = scene.listen()
    probe.close()
    server = build_server(scene.app, scene.front, Endpoint("127.0.0.1", 0, tls=tls, grpc_port=port))
    await server.start()
    address = f"localhost:{port}"
    if root is None:
        channel = grpc.aio.insecure_channel(address, OPTIONS)
    else:
        channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root), OPTIONS)
    try:
        async with channel:
            yield Client(channel, port)
    finally:
        await server.stop(None)


@pytest.fixture
async def client(scene: Scene) -> AsyncIterator[Client]:
    async with serving(scene) as made:
        yield made


def tensor(name: str, *values: Any, datatype: str = "", shape: Any = None, **fields: Any) -> dict[str, Any]:
    datatype = datatype or INPUTS[name].datatypes[0]
    values = tuple(value.encode() if isinstance(value, str) else value for value in values)
    contents = {"contents": {DATATYPES[datatype][1]: values}} if values else {}
    return {"name": name, "datatype": datatype, "shape": shape or [len(values)], **contents, **fields}


def prompt(*others: dict[str, Any], text: Any = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model_name": NAME, "inputs": [tensor("text_input", text), *others], **fields}


def values_of(response: Any) -> dict[str, Any]:
    """Return the output tensors of a response by name."""
    found = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            assert int.from_bytes(raw[:4], "little") == len(raw) - 4
            found[output.name] = raw[4:].decode()
        else:
            found[output.name] = list(struct.unpack(f"<{len(raw) // 4}i", raw))
            size = 1
            for dimension in output.shape:
                size *= dimension
            assert size == len(found[output.name])
    return found


async def failure(awaitable: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await awaitable
    return raised.value.code(), raised.value.details() or ""


async def test_a_request_is_that_of_the_completions_api(scene: Scene, client: Client) -> None:
    parameters = json.dumps({"temperature": "0.5", "seed": 7, "stop": "7"})
    others = [tensor("sampling_parameters", parameters), tensor("max_tokens", 50, datatype="INT64")]
    pending = asyncio.create_task(client.call("ModelInfer", **prompt(*others), id="mine"))
    request = await scene.next_request()
    count = scene.reply(request.request_id, " there you are")
    response = await pending
    assert (response.id, response.model_name, response.model_version) == ("mine", NAME, "1")
    expected = {"text_output": "Hello there you are", "finish_reason": "length", "num_output_tokens": [count]}
    assert values_of(response) == {**expected, "num_input_tokens": [len(request.token_ids) // 4]}

    other = scene.start(TEXT, text_body(prompt="Hello", temperature=0.5, seed=7, stop="7", echo=True))
    same = await scene.next_request()
    scene.reply(same.request_id, " there you are")
    assert (await other).json()["choices"][0]["text"] == "Hello there you are"
    assert (request.sampling, request.token_ids) == (same.sampling, same.token_ids)


async def test_token_ids_go_in_and_out(scene: Scene, client: Client) -> None:
    for excludes, echoed in ((False, [5, 6, 7]), (True, [])):
        inputs = [
            tensor("input_ids", 5, 6, 7, 0, shape=[1, 4]),
            tensor("input_lengths", 3, shape=[1, 1]),
            tensor("request_output_len", 9, shape=[1, 1]),
            tensor("end_id", 2),
            tensor("exclude_input_in_output", excludes),
        ]
        pending = asyncio.create_task(client.call("ModelInfer", model_name=NAME, inputs=inputs))
        request = await scene.next_request()
        assert struct.unpack("<3I", request.token_ids) == (5, 6, 7)
        assert (request.sampling.max_tokens, request.sampling.stop_token_ids) == (9, (2,))
        scene.emit(request.request_id, [11, 12])
        scene.end(request.request_id, output=2)
        found = values_of(await pending)
        assert (found["output_ids"], found["sequence_length"]) == ([*echoed, 11, 12], [len(echoed) + 2])


async def test_responses_of_a_stream_are_marked_and_several_requests_run_at_once(scene: Scene, client: Client) -> None:
    stream = client.stream()
    for name in ("one", "two"):
        await stream.write(CLASSES["ModelInferRequest"](**prompt(tensor("stream", True), id=name)))
    await stream.write(CLASSES["ModelInferRequest"](**prompt(tensor("stream", True), id="bad", model_version="2")))
    refused = await stream.read()
    assert (refused.error_message, refused.infer_response.id) == (
        f"model {NAME}: unknown version '2'; versions are: 1",
        "bad",
    )
    assert refused.infer_response.parameters[0].value.bool_param
    one, two = [await scene.next_request() for _ in range(2)]
    scene.emit_text(one.request_id, " a")
    scene.emit_text(two.request_id, " b")
    scene.end(two.request_id)
    scene.refuse(one.request_id, 502, "lost", attempt=1)
    await stream.done_writing()
    seen: dict[str, list[Any]] = {"one": [], "two": []}
    while (response := await stream.read()) is not grpc.aio.EOF:
        inner = response.infer_response
        (mark,) = inner.parameters
        assert mark.key == "triton_final_response"
        what = response.error_message or values_of(inner)["text_output"]
        seen[inner.id].append((what, mark.value.bool_param))
    assert seen == {
        "one": [(" a", False), ("because of lost", True)],
        "two": [(" b", False), ("", True)],
    }


async def test_a_stream_without_the_tensor_has_one_response(scene: Scene, client: Client) -> None:
    stream = client.stream()
    await stream.write(CLASSES["ModelInferRequest"](**prompt(outputs=[{"name": "finish_reason"}])))
    await stream.done_writing()
    scene.reply((await scene.next_request()).request_id, " there")
    (response,) = [one async for one in stream]
    assert values_of(response.infer_response) == {"finish_reason": "length"}
    assert response.infer_response.parameters[0].value.bool_param


@pytest.mark.parametrize("streams", [False, True])
async def test_a_request_is_cancelled_when_its_client_leaves(scene: Scene, client: Client, streams: bool) -> None:
    if streams:
        call = client.stream()
        await call.write(CLASSES["ModelInferRequest"](**prompt()))
        await scene.next_request()
        call.cancel()
    else:
        pending = asyncio.create_task(client.call("ModelInfer", **prompt()))
        await scene.next_request()
        pending.cancel()
    assert (await scene.cancelled()).reason == "client disconnected"
    await until(lambda: scene.front.admission.in_flight == 0)


async def test_a_client_that_leaves_a_stream_causes_no_failure(
    scene: Scene, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    call = client.stream()
    await call.write(CLASSES["ModelInferRequest"](**prompt(tensor("stream", True))))
    name = (await scene.next_request()).request_id
    after = scene.emit_text(name, " a")
    await call.read()
    call.cancel()
    scene.reply(name, " b c", first=after)  # perhaps before the server knows
    await until(lambda: scene.front.admission.in_flight == 0)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_key_is_required_before_a_message_is_read() -> None:
    async with keyed(key_of("acme"), require_key=True) as (scene, _), serving(scene) as client:
        assert (await client.call("ServerReady")).ready
        wrong = [("authorization", "Bearer no")]
        for call in (
            client.call("ModelInfer", **prompt()),
            client.call("ModelInfer", **prompt(), metadata=wrong),
            client.call("ModelReady", name=NAME),
            client.call("ModelMetadata", name=NAME, metadata=wrong),
            client.stream(wrong).read(),  # which waits for the first message otherwise
        ):
            code, text = await failure(call)
            assert code is Code.UNAUTHENTICATED
            assert "API key" in text
        metadata = [("authorization", "Bearer fb-acme")]
        assert (await client.call("ModelReady", name=NAME, metadata=metadata)).ready
        pending = asyncio.create_task(client.call("ModelInfer", **prompt(), metadata=metadata))
        request = await scene.next_request()
        assert request.tenant == "acme"
        scene.reply(request.request_id, " x")
        await pending


async def test_errors_have_the_code_of_their_status(scene: Scene, client: Client) -> None:
    for status, code in (
        (429, Code.RESOURCE_EXHAUSTED), (503, Code.UNAVAILABLE), (504, Code.DEADLINE_EXCEEDED), (502, Code.INTERNAL)
    ):  # fmt: skip
        pending = asyncio.create_task(client.call("ModelInfer", **prompt()))
        scene.refuse((await scene.next_request()).request_id, status, "why")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await pending
        error = raised.value
        assert (error.code(), error.details()) == (code, "because of why")
        trailers = {name: value for name, value in error.trailing_metadata() if not name.startswith("grpc")}
        assert trailers == {"error-code": "why", **({"retry-after": "1"} if status in (429, 503) else {})}
    assert (await failure(client.call("ModelInfer", **prompt() | {"model_name": "x"})))[0] is Code.NOT_FOUND
    assert (await failure(client.call("ModelMetadata", name="x")))[0] is Code.NOT_FOUND
    assert not (await client.call("ModelReady", name="x")).ready
    long = prompt(text="x" * (BODY_MAX + 1))
    assert await failure(client.call("ModelInfer", **long)) == (
        Code.INVALID_ARGUMENT,
        f"the body has too many bytes; the limit is {BODY_MAX:,} bytes (--body-bytes-max)",
    )
    longer = prompt(text="x" * (BODY_MAX + (64 << 10)))
    assert (await failure(client.call("ModelInfer", **longer)))[0] is Code.RESOURCE_EXHAUSTED
    scene.front.drain.begin()
    code, text = await failure(client.call("ModelInfer", **prompt()))
    assert (code, text) == (Code.UNAVAILABLE, "the server is shutting down")


RAW = {"raw_input_contents": [b"\5\0\0\0Hello"]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": []}, "the prompt is missing"),
        ({"inputs": [tensor("input_ids", 1, 2, shape=[2, 1])]}, "input_ids is a batch of 2"),
        ({"inputs": [tensor("text_input", "a", "b", shape=[1, 2])]}, r"text_input has shape \[1, 2\]"),
        ({"inputs": [tensor("text_input", "a", shape=[-1])]}, r"has shape \[-1\]; expected \[1\] or \[1, 1\]"),
        ({"inputs": [tensor("input_ids", 1, shape=[1, 0])]}, r"has shape \[1, 0\]; expected \[n\] or"),
        ({"inputs": [tensor("text_input", "a", shape=[1, 1, 1])]}, "has shape"),
        ({"inputs": [tensor("text_input", 1, datatype="INT32")]}, "has datatype 'INT32'; expected BYTES"),
        ({"inputs": [tensor("input_ids", 1, 2, shape=[3])]}, "3.*2 elements in int_contents"),
        ({"inputs": [tensor("text_input", b"\xff")]}, "not valid UTF-8"),
        ({"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1]}]}, "unknown input 'image'"),
        ({"inputs": [tensor("text_input", "a"), tensor("input_ids", 1)]}, "field prompt .* already set"),
        ({"inputs": [tensor("text_input", "a"), tensor("text_input", "b")]}, "text_input is given twice"),
        (
            {"inputs": [tensor("input_ids", 1, 2), tensor("input_lengths", -1)]},
            "input_lengths is -1, but input_ids has 2",
        ),
        ({"inputs": [tensor("text_input", "a") | {"datatype": "é" * 4_000}]}, "text_input has datatype 'éé"),
        ({"inputs": [tensor("text_input", "a"), tensor("input_lengths", 1)]}, "input_lengths is 1, but"),
        (prompt(tensor("temperature", float("nan"))), "temperature has the value nan"),
        (prompt(tensor("beam_width", 2)), "beam_width is 2, but must be 1"),
        (prompt(tensor("stream", True)), "use ModelStreamInfer"),
        (prompt(tensor("sampling_parameters", "[1]")), "expected a JSON object"),
        (prompt(tensor("sampling_parameters", '{"n": 2}')), "sampling_parameters has n, which only"),
        (prompt(tensor("sampling_parameters", '{"top_p": "many"}')), "top_p"),
        (prompt(parameters=[{"key": "lora_name", "value": {"string_param": "x"}}]), "lora_name"),
        (prompt(outputs=[{"name": "output_ids"}]), "unknown output 'output_ids'.*requires input_ids"),
        (prompt(tensor("end_id", 1, parameters=[{"key": "shared_memory_region"}])), "'shared_memory_region'"),
        (prompt(**RAW), "text_input is given twice"),
        (
            {"inputs": [tensor("text_input", shape=[1])], "raw_input_contents": [b"", b""]},
            "has 2 elements for 1 inputs",
        ),
        (
            {"inputs": [tensor("text_input", shape=[1])], "raw_input_contents": [b"\7\0\0\0ab"]},
            "end inside of an element",
        ),
        ({"inputs": [tensor("input_ids", shape=[1])], "raw_input_contents": [b"\7\0\0"]}, "end inside of an element"),
    ],
)
async def test_invalid_tensors_are_named(client: Client, fields: Any, message: str) -> None:
    code, text = await failure(client.call("ModelInfer", **{"model_name": NAME, **fields}))
    assert code is Code.INVALID_ARGUMENT
    assert_matches(text, message)


def assert_matches(text: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


async def test_certificates_are_renewed(scene: Scene, tmp_path: Path) -> None:
    roots = []
    for at in range(2):
        authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
        issued = authority.issue_cert("localhost", key_type=trustme.KeyType.ECDSA)
        roots.append(authority.cert_pem.bytes())
        file = tmp_path / f"{at}.pem"
        issued.private_key_and_cert_chain_pem.write_to_path(file)
        if not at:
            file.rename(tmp_path / "used.pem")
    async with serving(scene, TlsFiles(tmp_path / "used.pem"), roots[0]) as client:
        assert (await client.call("ServerReady")).ready
        (tmp_path / "1.pem").rename(tmp_path / "used.pem")
        renewed = grpc.ssl_channel_credentials(roots[1])
        async with grpc.aio.secure_channel(f"localhost:{client.port}", renewed, OPTIONS) as other:
            assert (await Client(other, client.port).call("ServerReady")).ready


VALUES = {
    "text_input": st.text(st.characters(exclude_categories=["Cs"])),
    "stream": st.booleans(),
    "temperature": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "seed": st.integers(-(1 << 31), (1 << 31) - 1),
    "input_ids": st.lists(st.integers(0, (1 << 31) - 1), min_size=1),
    "stop_words": st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1),
}
FORMS = {"BOOL": "?", "FP32": "f", "INT32": "i"}


@given(st.sampled_from(sorted(VALUES)).flatmap(lambda name: st.tuples(st.just(name), VALUES[name])))
def test_raw_and_typed_contents_have_the_same_values(drawn: tuple[str, Any]) -> None:
    name, value = drawn
    values = value if isinstance(value, list) else [value]
    one = tensor(name, *values)
    datatype = one["datatype"]
    texts = [struct.pack("<I", len(text)) + text for text in map(str.encode, map(str, values))]
    raw = b"".join(texts) if datatype == "BYTES" else struct.pack(f"<{len(values)}{FORMS[datatype]}", *values)
    needed = [] if name in ("text_input", "input_ids") else [tensor("text_input", "a")]
    typed = CLASSES["ModelInferRequest"](model_name=NAME, inputs=[one, *needed])
    bare = [{key: given for key, given in each.items() if key != "contents"} for each in (one, *needed)]
    untyped = CLASSES["ModelInferRequest"](
        model_name=NAME, inputs=bare, raw_input_contents=[raw, *(b"\1\0\0\0a" for _ in needed)]
    )
    body, _ = translate(typed, may_stream=True)
    assert translate(untyped, may_stream=True)[0] == body
    assert body[INPUTS[name].field] == (value if isinstance(value, list) or name != "input_ids" else [value])


SHAPES = st.lists(st.integers(-2, 3), max_size=3)
TENSORS = st.builds(
    lambda name, datatype, shape, contents: {"name": name, "datatype": datatype, "shape": shape, **contents},
    st.sampled_from([*INPUTS, "other"]),
    st.sampled_from([*DATATYPES, "FP16", ""]),
    SHAPES,
    st.sampled_from([{}, {"contents": {"int_contents": [1, 2]}}, {"contents": {"bytes_contents": [b'{"n": NaN}']}}]),
)


@given(st.lists(TENSORS, max_size=3), st.lists(st.binary(max_size=12), max_size=3), st.binary(max_size=60))
def test_any_message_is_a_body_or_an_error_of_the_client(inputs: Any, raw: list[bytes], message: bytes) -> None:
    requests = [CLASSES["ModelInferRequest"](model_name=NAME, inputs=inputs, raw_input_contents=raw)]
    with contextlib.suppress(DecodeError):  # gRPC answers such a message
        requests.append(CLASSES["ModelInferRequest"].FromString(message))
    for request in requests:
        try:
            json.dumps(translate(request, may_stream=True)[0], allow_nan=False)
        except ApiError as error:
            assert error.status in (400, 404)


async def test_a_taken_port_is_rejected(scene: Scene, client: Client) -> None:
    with pytest.raises(ConfigError, match="choose another --grpc-port"):
        build_server(scene.app, scene.front, Endpoint("127.0.0.1", 0, grpc_port=client.port))
