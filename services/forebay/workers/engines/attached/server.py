"""HTTP client of one attached server.

Theory of operation. Requests use connections that are kept open. A stream is aborted by closing its connection, on
which every known server frees the request. Discovery reads what servers publish about themselves: `/v1/models`, and
the sizes of the KV cache in vLLM's metrics or in SGLang's `/server_info`.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from forebay.events.codec import MALFORMED
from forebay.workers.engine import EngineError, one_line
from forebay.workers.engines.attached.errors import Rejected, StreamCut, message_of, rejection
from forebay.workers.engines.tensorrt_llm.requests import COUNT_END, TrtLlmStepStats

VLLM = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
SGLANG = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage")
FAMILIES = (VLLM, SGLANG)
JSON_LIST = "["


class MetricsUnreadable(ValueError):
    """The metrics of a server are malformed, or have none of the known names. The message tells which."""


class ServerLoad(NamedTuple):
    """Load of a server, of all its clients. `usage` is the share of the KV cache in use, from 0 to 1."""

    running: int
    waiting: int
    usage: float


def sample_lines(metrics: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the samples with these names. A server has some thousand samples, so the other lines are not parsed."""
    for line in metrics.split("\n"):
        if line.startswith(tuple(names)) and line.rstrip():
            yield line.rstrip()


def read_load(metrics: str) -> ServerLoad | None:
    """Return the load in the metrics of vLLM, SGLang or TensorRT-LLM. Samples of several engines are added up.

    Return None if TensorRT-LLM has run no iteration since the previous call. Raises MetricsUnreadable if the metrics
    are malformed, or have none of the known names.
    """
    if metrics.startswith(JSON_LIST):
        return _load_of_iterations(metrics)
    for names in FAMILIES:
        lines = list(sample_lines(metrics, names))
        if not lines:
            continue
        found: dict[str, list[float]] = {name: [] for name in names}
        try:
            for family in text_string_to_metric_families("\n".join(lines) + "\n"):
                for sample in family.samples:
                    if sample.name in found:
                        found[sample.name].append(float(sample.value))
        except ValueError as error:
            raise MetricsUnreadable(f"the metrics are malformed: {error}") from error
        running, waiting, usage = (found[name] for name in names)
        if running and all(0 <= value < COUNT_END for values in found.values() for value in values):
            return ServerLoad(int(sum(running)), int(sum(waiting)), min(1.0, max(usage, default=0.0)))
        raise MetricsUnreadable(f"the metrics have no valid value of {names[0]}")
    raise MetricsUnreadable("the metrics have no known names: " + ", ".join(names[0] for names in FAMILIES))


def _load_of_iterations(metrics: str) -> ServerLoad | None:
    try:
        iterations = msgspec.json.decode(metrics, type=list[TrtLlmStepStats])
    except MALFORMED as error:
        raise MetricsUnreadable(f"the statistics of iterations are malformed: {error}") from error
    if not iterations:
        return None
    last = iterations[-1]
    return ServerLoad(last.running, last.waiting, last.usage)


CONNECT_S = 5.0
REPLY_S = 5.0  # of small requests; HealthWatch ends a check after twice this time
COMMAND_S = 300.0  # loading an adapter, or computing a prompt
KEEP_ALIVE_S = 3.0  # less than the 5 s after which uvicorn closes an idle connection
END_S = 1.0  # from the last event of a stream to its end, after which its connection is used again
BODY_BYTES_MAX = 64 << 20  # of a response that is not a stream
EVENT_BYTES_MAX = 4 << 20  # of one event of a stream; with many log probabilities, some 10 KB
DONE = b"[DONE]"
LINE_END = re.compile(rb"\r\n|\n|\r")
LINE_BYTES = 64  # more than a line with `[DONE]` has
BOM = b"\xef\xbb\xbf"
SIZE_MAX = 1 << 31
Size = Annotated[int, msgspec.Meta(ge=1, lt=SIZE_MAX)]

ServerKind = Literal["vllm", "sglang", "tensorrt-llm", "openai"]
OWNERS: Mapping[str, ServerKind] = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "tensorrt-llm"}
"""Kind of a server by the field `owned_by` of its models; any other value is `openai`."""


class ListedModel(msgspec.Struct, frozen=True):
    """Entry of `/v1/models`. Servers add further fields.

    Attributes:
        root: model directory or name on the Hugging Face Hub; None if the server does not publish it.
        max_model_len: context length in tokens; None if the server does not publish it.
    """

    id: str
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
    max_model_len: Size | None = None


class _Models(msgspec.Struct):
    data: list[ListedModel]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _SglangInfo(msgspec.Struct):
    page_size: Size | None = None
    max_total_num_tokens: Size | None = None
    enable_deterministic_inference: bool = False


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that a server publishes about itself. `root` is the model's directory or name on the Hugging Face Hub.

    `loras` are the directories of the loaded adapters on the server. `is_deterministic` is whether SGLang uses a seed.
    """

    kind: ServerKind
    model: str
    root: str = ""
    context_tokens: int | None = None
    block_size: int | None = None
    kv_blocks: int | None = None
    loras: Mapping[str, str] = {}
    is_deterministic: bool = False


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """Server-sent event. `type` is empty if the stream names none. `data` are valid UTF-8."""

    type: str
    data: bytes


class SseDecoder:
    """Decodes the bytes of a stream of server-sent events as the HTML standard of WHATWG describes it.

    Lines end with CR, LF or CRLF. A BOM at the beginning, comments, and the fields `id` and `retry` are ignored. An
    event that the end of the stream cuts off is not returned.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._type = b""
        self._is_first_line = True
        self._ended_with_cr = False

    @property
    def pending_bytes(self) -> int:
        return len(self._line) + self._data_bytes

    @property
    def unfinished(self) -> bytes:
        """Data of the event that is not complete, with its last line, even if that is not complete."""
        last = [bytes(self._line).removeprefix(b"data:")] if self._line.startswith(b"data:") else []
        return b"\n".join([*self._data, *last])

    def feed(self, received: bytes) -> list[ServerEvent]:
        if self._ended_with_cr and received.startswith(b"\n"):
            received = received[1:]
            self._ended_with_cr = False
        if not received:
            return []
        self._ended_with_cr = received.endswith(b"\r")
        first, *others = LINE_END.split(received)
        self._line += first
        events = []
        for following in others:
            if (event := self._end_line()) is not None:
                events.append(event)
            self._line += following
        return events

    def _end_line(self) -> ServerEvent | None:
        line = bytes(self._line)
        self._line.clear()
        if self._is_first_line:
            line, self._is_first_line = line.removeprefix(BOM), False
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._data_bytes += len(value) + 1
        elif name == b"event":
            self._type = value
        return None

    def _dispatch(self) -> ServerEvent | None:
        data, kind = self._data, self._type.decode(errors="replace")
        self._data, self._data_bytes, self._type = [], 0, b""
        return ServerEvent(kind, b"\n".join(data).decode(errors="replace").encode()) if data else None


class UpstreamServer:
    """Client of one server. Use it on one event loop, and close it."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            # The router limits the requests in flight.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            json_serialize=lambda body: msgspec.json.encode(body).decode(),
        )

    async def close(self) -> None:
        """Close all connections, which aborts the requests in flight."""
        await self._session.close()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a small resource. Raises EngineError if it does not arrive within `REPLY_S`."""
        return await self._request("GET", path, None, REPLY_S)

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
        """Return the body of the response to a request that is not a stream.

        Raises Rejected if the server responded with an error, EngineError if it did not respond within `COMMAND_S`.
        """
        status, content = await self._request("POST", path, body, COMMAND_S, headers)
        if status >= 400:
            raise rejection(self.url, status, content)
        return content

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        within_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        try:
            async with (
                asyncio.timeout(within_s),
                self._session.request(method, self.url + path, json=body, headers=headers) as response,
            ):
                return response.status, await self._body(response)
        except TimeoutError:
            raise EngineError(f"the server {self.url} did not reply to {path} within {within_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: an invalid address
            raise EngineError(f"the server {self.url} cannot be reached: {one_line(error)}") from None

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[ServerEvent]]:
        """Send a request, and yield the events of its stream. Leaving the context aborts the request.

        Raises Rejected if the server responded with an error before the stream began, StreamCut if the connection
        failed.
        """
        try:
            async with self._session.post(self.url + path, json=body, headers=headers) as response:
                if response.status != 200:
                    after = response.headers.get("retry-after", "")
                    raise rejection(self.url, response.status, await self._body(response), after)
                try:
                    yield _events(response)
                finally:
                    if not response.content.at_eof():
                        response.close()
        except (aiohttp.ClientError, OSError, EngineError) as error:
            raise StreamCut(one_line(error)) from error

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for part in response.content.iter_any():
            body += part
            if len(body) > BODY_BYTES_MAX:
                raise EngineError(f"the server {self.url} sent more than {BODY_BYTES_MAX} bytes")
        return bytes(body)

    async def models(self) -> list[ListedModel]:
        """Return the entries of `/v1/models`.

        Raises EngineError if the server does not respond with a list of models.
        """
        status, body = await self.get("/v1/models")
        if status != 200:
            raise EngineError(f"the server {self.url} responded to /v1/models with {status}: {message_of(body)}")
        try:
            return msgspec.json.decode(body, type=_Models).data
        except MALFORMED as error:
            raise EngineError(
                f"the server {self.url} sent no list of models at /v1/models: {one_line(error)}"
            ) from None

    async def check_health(self) -> None:
        """Raise EngineError if the server does not respond or is not healthy.

        One without `/health` is healthy if it responds.
        """
        status, body = await self.get("/health")
        if status >= 500:
            raise EngineError(f"the server {self.url} is not healthy: {status}, {message_of(body)}")

    async def describe(self, name: str = "") -> ServerInfo:
        """Return what the server publishes about itself and a model, by default its first base model.

        Raises EngineError if the server cannot be reached, or serves no such model.
        """
        models = await self.models()
        bases = [one for one in models if not one.parent]
        if not bases:
            raise EngineError(f"the server {self.url} serves no model")
        base = next((one for one in bases if one.id == name), None) if name else bases[0]
        if base is None:
            served = ", ".join(one.id for one in bases)
            raise EngineError(f"the server {self.url} serves {served}, not {name}")
        kind = OWNERS.get(base.owned_by, "openai")
        block_size, kv_blocks, is_deterministic = await self._settings(kind)
        return ServerInfo(
            kind=kind,
            model=base.id,
            root=base.root or "",
            context_tokens=base.max_model_len,
            block_size=block_size,
            kv_blocks=kv_blocks,
            is_deterministic=is_deterministic,
            loras={one.id: one.root or "" for one in models if one.parent in {known.id for known in bases}},
        )

    async def tokenize(self, model: str, text: str, is_prompt: bool) -> list[int] | None:
        """Return token ids, or None if the server does not offer that. Raises EngineError if it does not respond."""
        body = {"model": model, "prompt": text, "add_special_tokens": is_prompt}
        try:
            return msgspec.json.decode(await self.post("/tokenize", body), type=_Tokens).tokens
        except (Rejected, *MALFORMED):
            return None

    async def _settings(self, kind: ServerKind) -> tuple[int | None, int | None, bool]:
        """Return tokens per KV block and number of KV blocks, each None if unknown, and `is_deterministic`."""
        if kind == "vllm":
            status, body = await self.get("/metrics")
            return (*(vllm_cache_sizes(body.decode(errors="replace")) if status == 200 else (None, None)), False)
        if kind == "sglang":
            for path in ("/server_info", "/get_server_info"):  # the second name is that of older releases
                status, body = await self.get(path)
                if status == 200:
                    with contextlib.suppress(*MALFORMED):
                        info = msgspec.json.decode(body, type=_SglangInfo)
                        size, tokens = info.page_size, info.max_total_num_tokens
                        blocks = tokens // size if size and tokens else None
                        return size, blocks, info.enable_deterministic_inference
        return None, None, False


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[ServerEvent]:
    """Yield each event until `[DONE]`. A server may also respond with one JSON document, which counts as an event.

    Raises StreamCut if the stream ends before `[DONE]`, or an event is too long.
    """
    decoder, begin = SseDecoder(), b""
    content = response.content
    is_document: bool | None = None  # unknown
    async for part in content.iter_any():
        received = part
        if is_document is not False:
            begin += part
            head = b"" if BOM.startswith(begin) else begin.removeprefix(BOM).lstrip()
            if head and is_document is None:
                is_document = head.startswith(b"{")  # no field of an event begins like this
            if len(begin) > EVENT_BYTES_MAX:
                raise StreamCut(f"the response is longer than {EVENT_BYTES_MAX} bytes")
            if is_document is not False:
                continue
            received = begin
        for event in decoder.feed(received):
            if event.data.strip() == DONE:
                await _end(content)
                return
            yield event
        # Some servers close the connection right behind these bytes.
        if decoder.pending_bytes < LINE_BYTES and decoder.unfinished.strip() == DONE:
            await _end(content)
            return
        if decoder.pending_bytes > EVENT_BYTES_MAX:
            raise StreamCut(f"an event of the stream is longer than {EVENT_BYTES_MAX} bytes")
    if is_document:
        yield ServerEvent("", begin.removeprefix(BOM))
    else:
        raise StreamCut("the server closed the connection before the response was complete")


async def _end(content: aiohttp.StreamReader) -> None:
    """Read the end of a stream, because a connection with unread data is closed. A failure has no effect."""
    with contextlib.suppress(aiohttp.ClientError, OSError):  # OSError includes TimeoutError
        async with asyncio.timeout(END_S):
            await content.readany()


def vllm_cache_sizes(metrics: str) -> tuple[int | None, int | None]:
    """Return tokens per block and number of blocks from vLLM's metric `vllm:cache_config_info`, each None if unknown.

    vLLM reserves one of its blocks.
    """
    for line in sample_lines(metrics, ("vllm:cache_config_info",)):
        labels = dict(re.findall(r'(\w+)="([0-9]{1,9})"', line))
        size, blocks = int(labels.get("block_size", 0)), int(labels.get("num_gpu_blocks", 0))
        return size or None, blocks - 1 if blocks > 1 else None
    return None, None
