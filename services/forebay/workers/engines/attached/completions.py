"""Requests to OpenAI's completions API, with the additional fields of vLLM and SGLang where a server supports them.

vLLM and SGLang accept prompts as token ids, and return token ids with `return_token_ids`. Of other servers and older
releases, `Completions.probe` finds out whether they do. A server that rejects an optional field gets it no more.

Servers deviate most at the end of a response. A response is complete with a finish reason or with `[DONE]`. Unknown
finish reasons count as `stop`. More output than requested is dropped.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from forebay.events.base import U32_BYTES
from forebay.events.codec import MALFORMED
from forebay.events.requests import Sampling, StructuredOutput
from forebay.events.tokens import TokenLogprob
from forebay.events.transfer import KvLayout, Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineError, one_line
from forebay.workers.engines.attached.errors import Rejected, StreamCut, error_in
from forebay.workers.engines.attached.server import ServerEvent, ServerKind, UpstreamServer
from forebay.workers.engines.kv_descriptor import Unfetchable, decoded, offered
from forebay.workers.engines.sglang.requests import structured_argument
from forebay.workers.engines.vllm.requests import LOGPROB_MIN, structured_arguments, token_logprob
from forebay.workers.engines.vllm.transfer import PREFILL, UNREAD_S, VLLM_LEASE_S, WANTED

PATH = "/v1/completions"
TOKEN_ID = "token_id:"  # noqa: S105 - prefix of a token in vLLM's log probabilities
STANDARD = ("max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty")
EXTENDED: tuple[ServerKind, ...] = ("vllm", "sglang")  # servers that support all parameters
EXTENSIONS = ("ignore_eos", "top_k", "min_p", "repetition_penalty", "min_tokens")
DEFAULTS = Sampling(max_tokens=1)
TOKEN_ID_MAX = 0xFFFF_FFFF
REASON_CHARS_MAX = 64
OPTIONAL = ("return_token_ids", "return_tokens_as_token_ids", "stream_options", "add_special_tokens")
"""Fields without which a server still serves a request."""
REASONS: Mapping[str, str] = {
    "length": "length",
    "max_tokens": "length",
    "max_length": "length",
    "max_new_tokens": "length",
    "model_length": "length",
    "content_filter": "content_filter",
    "abort": "abort",
    "error": "error",
}
"""Finish reasons, in lower case, that do not mean `stop`."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=TOKEN_ID_MAX)]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New output of a request.

    Attributes:
        token_ids: new output tokens; None if the server returns text only.
        text: new output as text; only read if `token_ids` is None.
        finish_reason: why the response has ended: `stop`, `length`, `content_filter`, `abort`; empty if it has not.
        cached_tokens: number of prompt tokens in the server's cache; None if this event does not report it.
    """

    token_ids: list[int] | None = None
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str = ""
    cached_tokens: int | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a server. Its prompt has the output tokens of earlier attempts at its end.

    Attributes:
        text: the prompt as text, for a server that accepts no token ids; empty for the others.
        request_id: id of the request at the server; no two requests in flight have the same.
        transfer: vLLM's `kv_transfer_params`; None without KV transfer.
        traceparent: trace context of the request; empty for none.
    """

    token_ids: list[int]
    text: str = ""
    sampling: Sampling
    lora_name: str = ""
    cache_salt: str = ""
    request_id: str
    transfer: Mapping[str, Any] | None = None
    traceparent: str = ""

    @property
    def headers(self) -> dict[str, str]:
        trace = {"traceparent": self.traceparent} if self.traceparent else {}
        return {"x-request-id": self.request_id, **trace}


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    index: int | None = None
    token_ids: list[TokenId] | None = None
    logprobs: Any = None  # other servers have other forms; read only if requested
    finish_reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def choice(self) -> _Choice | None:
        return next((one for one in self.choices or () if not one.index), None)


_DECODER = msgspec.json.Decoder(_Completion)


class Completions:
    """Completions API of one server.

    Attributes:
        returns_logprobs: whether log probabilities name token ids.
        salts_cache: whether requests with different salts share no cached blocks.
    """

    def __init__(self, server: UpstreamServer, model: str, kind: ServerKind) -> None:
        self.server = server
        self._model = model
        self._kind = kind
        self.takes_token_ids = True
        self.returns_token_ids = True
        self._refused: set[str] = set()  # optional fields that the server has rejected
        self.returns_logprobs = kind == "vllm"
        self.salts_cache = kind in EXTENDED

    async def probe(self, prompt: list[int], text: str) -> None:
        """Run a small request, and find out whether the server accepts and returns token ids, or raise EngineError."""
        sampling = Sampling(max_tokens=1, temperature=0.0)
        call = Call(token_ids=prompt, text=text, sampling=sampling, request_id="forebay-probe")
        ways: list[tuple[bool, tuple[str, ...]]] = [(True, ()), (False, ())]
        if self._kind != "vllm":
            ways += [(True, OPTIONAL), (False, OPTIONAL)]  # strict servers reject every field that they do not know
        for self.takes_token_ids, refused in ways:
            self._refused.update(refused)
            try:
                found = await self._post(call)
            except Rejected as rejected:
                is_last = (self.takes_token_ids, refused) == ways[-1]
                if rejected.error.code == "invalid_request" and not is_last and self._kind != "vllm":
                    continue
                raise EngineError(f"the server {self.server.url} rejected the first prompt: {rejected}") from None
            except StreamCut as cut:
                raise EngineError(f"the server {self.server.url} sent no completion: {cut}") from None
            if (choice := found.choice) is None:
                raise EngineError(f"the server {self.server.url} sent no completion: the response has no choice")
            # Some servers leave out the token that ends a response, so there may be no token and no text.
            self.returns_token_ids = choice.token_ids is not None and bool(choice.token_ids or not choice.text)
            self.returns_logprobs &= self.returns_token_ids
            return

    async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        """Run a request, and yield its output until its end. Closing the iterator aborts the request.

        Raises Rejected if the server responded with an error, or does not support a parameter of the request, StreamCut
        if the connection failed, or the response is unreadable.
        """
        while True:
            body, is_over = self.body(call, stream=True), False
            try:
                async with self.server.stream(PATH, body, call.headers) as events:
                    async for delta in self._deltas(events, call.sampling):
                        is_over = is_over or bool(delta.finish_reason)
                        yield delta
            except Rejected as rejected:
                if not self._refuses(rejected, body):
                    raise
            except StreamCut:
                if not is_over:  # after the finish reason only the usage is missing
                    raise
                return
            else:
                if not is_over:  # many servers end a complete response with `[DONE]` only
                    yield Delta(token_ids=[] if self.returns_token_ids else None, finish_reason="stop")
                return

    async def _deltas(self, events: AsyncIterator[ServerEvent], sampling: Sampling) -> AsyncIterator[Delta]:
        """Yield the output in the events of a stream, at most `max_tokens` tokens if the server returns token ids."""
        left = sampling.max_tokens
        async for event in events:
            delta = self._delta(self._read(event.data, is_error=event.type == "error"), sampling.logprobs)
            token_ids = delta.token_ids or []
            if len(token_ids) > left:  # the server ignores max_tokens
                cut = {"token_ids": token_ids[:left], "logprobs": delta.logprobs[:left]}
                yield msgspec.structs.replace(delta, finish_reason="length", **cut)
                return
            left -= len(token_ids)
            yield delta

    def _refuses(self, rejected: Rejected, body: Mapping[str, Any]) -> bool:
        """Return whether a server rejected a request because of optional fields. Further requests do not have them."""
        if rejected.error.code != "invalid_request":
            return False
        named = {name for name in OPTIONAL if name in body and name.encode() in rejected.body}
        self._refused |= named
        return bool(named)

    async def _post(self, call: Call, headers: Mapping[str, str] | None = None) -> _Completion:
        while True:
            body = self.body(call, stream=False)
            try:
                return self._read(await self.server.post(PATH, body, headers))
            except Rejected as rejected:
                if not self._refuses(rejected, body):
                    raise

    def _delta(self, found: _Completion, top: int | None) -> Delta:
        """Return the output in an event of a stream.

        Raises Rejected if the finish reason is an error, StreamCut if the output lacks what this server returns.
        """
        cached = _cached_tokens(found)
        if (choice := found.choice) is None:
            return Delta(token_ids=[], cached_tokens=cached)
        reason = REASONS.get(choice.finish_reason.lower(), "stop") if choice.finish_reason else ""
        if reason == "error":
            message = f"the server {self.server.url} ended the response with an error"
            raise Rejected(502, "engine_error", message, may_move=True)
        token_ids = choice.token_ids if self.returns_token_ids else None
        if self.returns_token_ids and token_ids is None:
            if choice.text or not reason:
                raise StreamCut("the server stopped returning token ids")
            token_ids = []
        logprobs = () if top is None else _logprobs(choice.logprobs, top)
        if top is not None and token_ids is not None and len(logprobs) != len(token_ids):
            raise StreamCut(f"the server sent {len(logprobs)} log probabilities for {len(token_ids)} tokens")
        return Delta(
            token_ids=token_ids, text=choice.text or "", logprobs=logprobs, finish_reason=reason, cached_tokens=cached
        )

    async def prefill(self, call: Call) -> tuple[dict[str, Any] | None, int | None]:
        """Compute a prompt whose KV another server fetches. `call` has its `transfer`, and asks for one token.

        Return vLLM's `kv_transfer_params`, None if the server keeps no KV, and the number of cached prompt tokens, None
        if the server does not report it.

        Raises Rejected if the server responded with an error, StreamCut if the response is unreadable, EngineError if
        the server cannot be reached.
        """
        found = await self._post(call, call.headers)
        if found.choice is None:
            raise StreamCut("the response has no choice")
        return found.kv_transfer_params, _cached_tokens(found)

    def body(self, call: Call, *, stream: bool) -> dict[str, Any]:
        """Return the body of a request. Raises Rejected if its structured output is invalid or not supported."""
        sampling = call.sampling
        body: dict[str, Any] = {
            "model": call.lora_name or self._model,
            "prompt": call.token_ids if self.takes_token_ids else call.text,
            "stream": stream,
            **{name: getattr(sampling, name) for name in STANDARD},
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        for name in ("seed", "logprobs"):
            if (value := getattr(sampling, name)) is not None:
                body[name] = value
        if sampling.logit_bias:
            body["logit_bias"] = {str(one.token_id): one.bias for one in sampling.logit_bias}
        if self.returns_token_ids:
            body["return_token_ids"] = True
            body["return_tokens_as_token_ids"] = True
        if not self.takes_token_ids:
            body["add_special_tokens"] = False  # the prompt already has them
        # vLLM and SGLang replace fields that are missing by the defaults of the model, and the ingress has already done
        # that. Other servers may not know the fields, so they get only those that the client has set.
        for name in EXTENSIONS:
            value = getattr(sampling, name)
            if self._kind in EXTENDED or value != getattr(DEFAULTS, name):
                body[name] = value
        if sampling.stop_token_ids:
            body["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.structured is not None:
            body |= self._structured(sampling.structured)
        if self._kind == "sglang":
            body["rid"] = call.request_id
            body["top_k"] = sampling.top_k or -1
            if call.lora_name:
                body |= {"model": self._model, "lora_path": call.lora_name}  # the name alone would be the base model
        if call.cache_salt:
            body["cache_salt"] = call.cache_salt
        if call.transfer is not None:
            body["kv_transfer_params"] = dict(call.transfer)
        return {name: value for name, value in body.items() if name not in self._refused} if self._refused else body

    def _structured(self, structured: StructuredOutput) -> dict[str, Any]:
        if self._kind not in EXTENDED:  # others would ignore the field, and generate any text
            message = f"the server {self.server.url} does not support structured output; attach vLLM or SGLang"
            raise Rejected(501, "not_supported", message)
        try:
            if self._kind == "sglang":
                return dict([structured_argument(structured)])
            return {"structured_outputs": structured_arguments(structured)}
        except ValueError as error:
            raise Rejected(400, "invalid_request", one_line(error)) from None

    def _read(self, data: bytes, *, is_error: bool = False) -> _Completion:
        """Decode a response or an event of a stream.

        Raises Rejected if it is an error, StreamCut if it is malformed.
        """
        try:
            found = _DECODER.decode(data)
        except MALFORMED as error:
            if (rejected := error_in(self.server.url, data, is_error=is_error)) is not None:
                raise rejected from None
            raise StreamCut(f"the server sent a malformed completion: {one_line(error)}") from error
        # With a choice it is an error only if it says so, which saves the second look at each token.
        if is_error or found.error is not None or not found.choices:
            rejected = error_in(self.server.url, data, is_error=is_error)
            if rejected is not None:
                raise rejected
        return found


def _cached_tokens(found: _Completion) -> int | None:
    details = None if found.usage is None else found.usage.prompt_tokens_details
    return None if details is None else details.cached_tokens


def _logprobs(given: Any, top: int) -> tuple[TokenLogprob, ...]:
    """Return the log probability of each token, with the `top` most likely tokens at its position.

    Raises StreamCut if the log probabilities are malformed, or an entry has no token id.
    """
    if given is None:
        return ()
    try:
        found = msgspec.convert(given, _Logprobs)
    except msgspec.ValidationError as error:
        raise StreamCut(f"the server sent malformed log probabilities: {one_line(error)}") from error
    places = found.top_logprobs or [None] * len(found.tokens)
    converted = []
    for logprob, place in zip(found.token_logprobs, places, strict=False):
        ranked = sorted(((_number(value), name) for name, value in (place or {}).items()), reverse=True)
        converted.append(token_logprob(_number(logprob), [(_token_id(name), value) for value, name in ranked[:top]]))
    return tuple(converted)


def _number(logprob: float | None) -> float:
    return LOGPROB_MIN if logprob is None else logprob


def _token_id(name: str) -> int:
    number = name.removeprefix(TOKEN_ID)
    if not (number.isdecimal() and len(number) <= len(str(TOKEN_ID_MAX))):
        raise StreamCut("the log probabilities have no token ids")
    return int(number)


CONTEXT_TOKENS = 8  # decoded in front of a piece, because the text of a token may depend on those before it
HELD_CHARS_MAX = 256  # longer text is encoded as well as possible, so that a stream never stops
ANCHOR = "\n"  # tokenizers add a space in front of a text, but not behind a new line, whose token has no other text

Encode = Callable[[str], list[int]]
"""Return the tokens of a text, without the special tokens around a prompt."""
Decode = Callable[[Sequence[int]], str]
"""Return the text of tokens."""


class TextEncoder:
    """Encodes the output text of one response of a server that returns no token ids.

    The log, the ingress and the parsers work on tokens. The tokens may differ from those that the server generated, but
    their text is the same: each piece is encoded behind the last tokens before it, and is held back until its tokens
    decode to exactly this piece.

    `inexact` counts pieces whose tokens do not decode to exactly their text.
    """

    def __init__(self, encode: Encode, decode: Decode) -> None:
        self._encode = encode
        self._decode = decode
        self._anchor = encode(ANCHOR)
        self._last = self._anchor
        self._held = ""
        self.inexact = 0

    def push(self, text: str, *, is_last: bool = False) -> list[int]:
        """Return the tokens of the next piece of text; empty if they are held back until more text is known.

        Nothing is held back if the piece is the last.
        """
        self._held += text
        if not self._held:
            return []
        before = self._decode(self._last)
        for token_ids in (
            self._behind(self._last, before),
            self._encode(self._held),
            self._behind(self._anchor, ANCHOR),
        ):
            if token_ids and self._decode(self._last + token_ids) == before + self._held:
                return self._take(token_ids)
        if not is_last and len(self._held) <= HELD_CHARS_MAX:
            return []
        self.inexact += 1
        return self._take(self._encode(self._held))

    def _behind(self, token_ids: list[int], text: str) -> list[int]:
        """Return the tokens of the held text behind a text and its tokens; empty if tokens span both texts."""
        together, begins = self._encode(text + self._held), len(token_ids)
        return together[begins:] if together[:begins] == token_ids else []

    def _take(self, token_ids: list[int]) -> list[int]:
        self._held = ""
        self._last = (self._last + token_ids)[-CONTEXT_TOKENS:]
        return token_ids


CONNECTOR = "vllm-http"
LAYOUT = KvLayout(connector=CONNECTOR, dtype="unknown", block_bytes=1)
"""Layout of all attached servers. Servers do not publish theirs; vLLM's connector itself compares them."""
# A vLLM server keeps the blocks of a prompt until another server has read them, or until vLLM's own timeout, which
# forebay cannot change over HTTP. After it other requests may have overwritten the blocks, and vLLM would read them
# without an error. So the owner gets one half of the timeout to send the prompt to a decode worker, and the decode
# server gets the other half until its first token.
HALF_LEASE_S = (VLLM_LEASE_S - UNREAD_S) / 2
NOTHING_REMOTE = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
PREFILL_PARAMS: Mapping[str, Any] = {**PREFILL, **NOTHING_REMOTE}

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class _TransferParams(msgspec.Struct):
    """The fields that forebay checks. All fields are passed on unchanged."""

    remote_engine_id: Text
    remote_host: Text
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    remote_block_ids: Annotated[list[Any], msgspec.Meta(min_length=1)]
    remote_num_tokens: int | None = None


def offer(item: WorkItem, worker_id: str, model: str, params: Mapping[str, Any]) -> Prefilled:
    """Return the descriptor of KV that a server keeps. Raises Unfetchable if the parameters are unknown."""
    try:
        msgspec.convert(params, _TransferParams)
    except msgspec.ValidationError as error:
        raise Unfetchable(f"unknown kv_transfer_params of the server: {error}") from error
    tokens = len(item.token_ids) // U32_BYTES
    return offered(item, worker_id, model, CONNECTOR, msgspec.json.encode(params), tokens=tokens, lease_s=HALF_LEASE_S)


def fetch_params(prefilled: Prefilled | None, model: str, prompt_tokens: int) -> dict[str, Any]:
    """Return the `kv_transfer_params` with which a server fetches the KV of a prompt.

    Raises Unfetchable if the descriptor is missing, invalid, or for another connector, model or prompt.
    """
    found = decoded(prefilled, CONNECTOR, model, prompt_tokens, msgspec.json.Decoder(_TransferParams).decode)
    params = decoded(prefilled, CONNECTOR, model, prompt_tokens, msgspec.json.Decoder(dict[str, Any]).decode)
    if found.remote_num_tokens not in (None, prompt_tokens):
        raise Unfetchable(f"its KV covers {found.remote_num_tokens} tokens, the prompt has {prompt_tokens}")
    return params | WANTED
