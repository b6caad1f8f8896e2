"""The formats of responses: what an API makes of the output of one request, as JSON objects for its clients.

A formatter is pure: it depends on the rendering of the request, its id and the output only. So every ingress encodes
the same bytes, whichever one the client has submitted the request to.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from forebay.events.rendering import Rendering
from forebay.events.tokens import PrefilledBy, Usage
from forebay.ingress.errors import ApiError
from forebay.ingress.parsers.deltas import OutputDelta


class SseEvent(msgspec.Struct, frozen=True, gc=False):
    """Server-sent event of a stream: its data is JSON, and its name is empty if the API names no events."""

    data: bytes
    name: str = ""


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
        counts_each_event: whether the events of `delta` and `close` get the token counts so far from `with_usage`.
    """

    done = b""
    counts_each_event = False
    needs_positions = False

    def __init__(self, rendering: Rendering, response_id: str) -> None:
        self.rendering = rendering
        self.response_id = response_id

    def begin(self) -> list[SseEvent]:
        """Return the events before any output, for a request that is on the log."""
        return []

    @abstractmethod
    def delta(self, index: int, delta: OutputDelta) -> list[SseEvent]:
        """Return the events for the output of one token position. Only the first delta of a choice may be empty."""

    @abstractmethod
    def close(self, index: int, reason: str, served: ServingInfo) -> list[SseEvent]:
        """Return the events after the last delta of a choice, which has at least one.

        `reason` is `stop`, `length`, `tool_calls` or `content_filter`.
        """

    @abstractmethod
    def finish(self, usage: Usage) -> list[SseEvent]:
        """Return the last events, after all choices were closed."""

    def with_usage(self, event: SseEvent, usage: Usage) -> SseEvent:
        """Return an event with the token counts so far."""
        return event

    @abstractmethod
    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Return the response to a client that requested no stream."""

    @staticmethod
    def error_body(error: ApiError) -> bytes:
        """Return the body of a response with an HTTP status of 400 or above."""
        return error.encoded()

    def error(self, error: ApiError) -> list[SseEvent]:
        """Return the events that end a stream with an error."""
        return [SseEvent(self.error_body(error))]
