"""The formats of responses: what an API makes of the output of one request, as JSON objects for its clients.

A formatter is pure: it depends on the rendering of the request, its id and the output only. So every ingress encodes
the same bytes, whichever one the client has submitted the request to.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from forebay.events.rendering import Rendering
from forebay.events.tokens import PrefilledBy, Usage
from forebay.ingress.errors import ApiError
from forebay.ingress.parsers.deltas import DecodedLogprob, OutputDelta, ToolCallDelta, is_json


class StreamEvent(msgspec.Struct, frozen=True, gc=False):
    """Event of a stream, or the only one of a whole response.

    Attributes:
        data: JSON object.
        name: name of the event; empty if the API names no events.
        index: position of the choice, -1 for an event that another ingress does not repeat, and for a whole response.
        position: number of tokens of the choice before the event.
        part: number of events of the choice since that token.
    """

    data: bytes
    name: str = ""
    index: int = -1
    position: int = 0
    part: int = 0

    @property
    def id(self) -> str:
        """Id of the event, `choice-position-part`; empty for an event that another ingress does not repeat."""
        return "" if self.index < 0 else f"{self.index}-{self.position}-{self.part}"

    def encoded(self) -> bytes:
        """Return the event as a server-sent event."""
        name = b"event: %b\n" % self.name.encode() if self.name else b""
        if self.index < 0:
            return b"%bdata: %b\n\n" % (name, self.data)
        return b"id: %d-%d-%d\n%bdata: %b\n\n" % (self.index, self.position, self.part, name, self.data)


class ServingInfo(msgspec.Struct, frozen=True):
    """How a request was served: by which workers, for the extension `forebay` of the response, and until what.

    Attributes:
        attempts: number of attempts to serve the request, including the successful one.
        prefilled: the worker that computed the prompt; None if `worker` computed it itself.
        stop: stop string of the request that ended the output; empty if none did.
    """

    request_id: str
    worker: str
    rank: int
    attempts: int
    prefilled: PrefilledBy | None = None
    stop: str = ""

    def worker_id(self) -> dict[str, Any]:
        """Return workers and ranks in the format of Dynamo's extension `nvext`."""
        prefilled = self.prefilled
        return {
            "prefill_worker_id": self.worker if prefilled is None else prefilled.worker_id,
            "prefill_dp_rank": self.rank if prefilled is None else prefilled.rank,
            "decode_worker_id": self.worker,
            "decode_dp_rank": self.rank,
        }

    def plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "request_id": self.request_id,
            "worker": self.worker,
            "rank": self.rank,
            "attempts": self.attempts,
        }
        if (prefilled := self.prefilled) is not None:
            plain["prefill"] = {
                "worker": prefilled.worker_id,
                "rank": prefilled.rank,
                "transferred_bytes": prefilled.transferred_bytes,
                "transfer_ms": prefilled.transfer_us / 1e3,
            }
        return plain


REASONING, TEXT, CALL = "reasoning", "text", "call"  # kinds of blocks


def logprob_of(one: DecodedLogprob, *, has_bytes: bool = True) -> dict[str, Any]:
    """Return a token with its log probability in OpenAI's format."""

    def token(one: DecodedLogprob) -> dict[str, Any]:
        return {"token": one.text, "logprob": one.logprob, **({"bytes": [*one.token]} if has_bytes else {})}

    return {**token(one), "top_logprobs": [token(top) for top in one.top]}


class WholeChoice(NamedTuple):
    """Output of one choice, its finish reason, and the workers that generated it."""

    deltas: Sequence[OutputDelta]
    reason: str
    served: ServingInfo


class Formatter(ABC):
    """Encodes the response to one request of a client, either as the events of a stream or as a whole.

    The methods for a stream are called in the order of the output. `index` is the position of a choice, from 0.

    Attributes:
        response_id: id of the response for the client.
        done: bytes after the last event of a stream that succeeded.
        needs_positions: whether the whole response depends on the deltas of single token positions.
        needs_tokens: whether the deltas need the ids of their tokens.
        counts_each_event: whether the events of `delta` and `close` get the token counts so far from `with_usage`.
    """

    done = b""
    counts_each_event = False
    needs_positions = False
    needs_tokens = False

    def __init__(self, rendering: Rendering, response_id: str) -> None:
        self.rendering = rendering
        self.response_id = response_id

    def begin(self) -> list[StreamEvent]:
        """Return the events before any output, for a request that is on the log."""
        return []

    @abstractmethod
    def delta(self, index: int, delta: OutputDelta) -> list[StreamEvent]:
        """Return the events for the output of one token position. Only the first delta of a choice may be empty."""

    @abstractmethod
    def close(self, index: int, reason: str, served: ServingInfo) -> list[StreamEvent]:
        """Return the events after the last delta of a choice, which has at least one.

        `reason` is `stop`, `length`, `tool_calls` or `content_filter`.
        """

    @abstractmethod
    def finish(self, usage: Usage) -> list[StreamEvent]:
        """Return the last events, after all choices were closed."""

    def with_usage(self, data: bytes, usage: Usage) -> bytes:
        """Return the data of an event with the token counts so far."""
        return data

    @abstractmethod
    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Return the response to a client that requested no stream."""

    def error(self, error: ApiError) -> list[StreamEvent]:
        """Return the events that end a stream with an error."""
        return [StreamEvent(error.encoded())]


@dataclass(slots=True)
class Block:
    """Output of one kind in a response: reasoning, text, or a call of a function.

    Attributes:
        index: position in the response.
        call: name and id of the function that is called; None for another kind.
        status: `in_progress` while more output may follow, then the status that the API shows.
        logprobs: tokens of a text, if the client requested their log probabilities.
    """

    kind: str
    index: int
    call: ToolCallDelta | None
    status: str = "in_progress"
    texts: list[str] = field(default_factory=list)
    logprobs: list[DecodedLogprob] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return self.status == "in_progress"

    @property
    def text(self) -> str:
        return "".join(self.texts)


class BlockFormatter(Formatter):
    """Base of formats whose response is a sequence of blocks. It has one choice.

    A block ends when the next one begins. Parsers of engines may interleave calls, so a call whose arguments are not
    complete then stays open until the end of the response. A whole response is built by the methods for a stream, so
    both have the same blocks.
    """

    needs_positions = True

    def __init__(self, rendering: Rendering, response_id: str) -> None:
        super().__init__(rendering, response_id)
        self.blocks: list[Block] = []
        self._calls: dict[int, Block] = {}
        self._events: list[StreamEvent] = []

    def delta(self, index: int, delta: OutputDelta) -> list[StreamEvent]:
        for kind, text in ((REASONING, delta.reasoning), (TEXT, delta.content)):
            if text:
                last = self.blocks[-1] if self.blocks else None
                self._append(last if last is not None and last.kind == kind else self._open(kind), text)
        for call in delta.calls:
            block = self._calls.get(call.index)
            if block is None:
                block = self._calls[call.index] = self._open(CALL, call)
            if call.arguments:
                self._append(block, call.arguments)
        return self._taken()

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        ((deltas, reason, served),) = choices
        for delta in deltas:
            self.delta(0, delta)
        self.close(0, reason, served)
        self.finish(usage)
        return msgspec.json.encode(self.plain())

    def _open(self, kind: str, call: ToolCallDelta | None = None) -> Block:
        if self.blocks and (self.blocks[-1].call is None or is_json(self.blocks[-1].text)):
            self._end(self.blocks[-1])
        block = Block(kind, len(self.blocks), call)
        self.blocks.append(block)
        self._begin(block)
        return block

    def _end_all(self) -> None:
        for block in self.blocks:
            if block.is_open:
                self._end(block)

    def _emit(self, name: str, **fields: Any) -> None:
        self._events.append(StreamEvent(msgspec.json.encode({"type": name, **fields}), name))

    def _taken(self) -> list[StreamEvent]:
        events, self._events = self._events, []
        return events

    @abstractmethod
    def plain(self) -> dict[str, Any]:
        """Return the response object with the output so far."""

    @abstractmethod
    def _begin(self, block: Block) -> None:
        """Emit the events before the output of a block."""

    @abstractmethod
    def _append(self, block: Block, text: str) -> None:
        """Add text to a block, and emit its event."""

    @abstractmethod
    def _end(self, block: Block) -> None:
        """End a block, and emit the events after its output."""
