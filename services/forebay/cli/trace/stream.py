"""One streamed completion over HTTP: sends a request, and measures the response."""

import json as jsonlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from forebay.cli.common.failures import TEXT_CHARS_MAX, Failure, event_failure, status_failure


@dataclass(slots=True)
class StreamedResponse:
    """Streamed response to one request. Times are of the clock `time.perf_counter`."""

    output_tokens: int  # number of tokens that the request asks for
    sent_s: float = field(default_factory=time.perf_counter)  # time of the first attempt
    first_s: float = 0.0  # arrival of the first token; 0 before
    last_s: float = 0.0  # arrival of the last token; 0 before
    ended_s: float = 0.0  # arrival of the last event; 0 before
    status: int = 0  # HTTP status; 0 before the head of the response
    # Seconds after which to send the request again, because its group has no owner; None otherwise.
    retry_s: float | None = None
    worker: str = ""
    computed_by: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    # Id of the response in each event with token counts, of which there should be one.
    usage_ids: list[str] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return (self.first_s - self.sent_s) * 1e3

    @property
    def itl_s(self) -> float:
        """Mean seconds between two tokens; 0 for a response of one token."""
        return (self.last_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def cached_tokens(self) -> int:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    async def follow(
        self, client: httpx.AsyncClient, url: str, body: bytes, headers: Mapping[str, str]
    ) -> Failure | None:
        """Send the body of a request and follow its stream to the end. Return the failure, or None."""
        self.status, self.retry_s = 0, None
        try:
            return await self._follow(client, f"{url}/v1/completions", body, headers)
        except httpx.HTTPError as error:
            return transport_failure(error, streaming=self.status == httpx.codes.OK)
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # an event that is not of OpenAI's API
            return Failure("malformed response", repr(error))

    async def _follow(
        self, client: httpx.AsyncClient, url: str, body: bytes, headers: Mapping[str, str]
    ) -> Failure | None:
        headers = {"content-type": "application/json", **headers}
        is_done = False
        async with client.stream("POST", url, content=body, headers=headers) as response:
            self.status = response.status_code
            if self.status != httpx.codes.OK:
                content = await response.aread()
                if b'"no_owner"' in content and "retry-after" in response.headers:
                    self.retry_s = float(response.headers["retry-after"])
                return status_failure(self.status, content)
            self.worker = self.computed_by = response.headers.get("x-forebay-worker", "")
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                self.ended_s = time.perf_counter()
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    is_done = True
                elif '"error"' in data and '"choices"' not in data:
                    return event_failure(data.encode())
                else:
                    self._read_event(data)
        if not is_done or not self.usage:
            return Failure("broken stream", "the stream ended before its last event")
        if self.usage["completion_tokens"] != self.output_tokens:
            text = f"got {self.usage['completion_tokens']} output tokens, expected {self.output_tokens}"
            return Failure("wrong length of the response", text)
        return None

    def _read_event(self, data: str) -> None:
        if '"usage"' in data:
            chunk = jsonlib.loads(data)
            if usage := chunk.get("usage"):
                self.usage = usage
                self.usage_ids.append(chunk["id"])
                if self.first_s and not chunk["choices"]:
                    return
        elif '"forebay"' in data:
            served = jsonlib.loads(data).get("forebay", {})
            self.computed_by = served.get("prefill", {}).get("worker", self.worker)
        self.last_s = self.ended_s
        self.first_s = self.first_s or self.ended_s


def streaming_body(output_tokens: int, fields: Mapping[str, Any]) -> bytes:
    """Return the body of a request with these fields and `output_tokens` streamed tokens.

    Encode it before the request is due, because a long prompt takes milliseconds.
    """
    fixed = {"max_tokens": output_tokens, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode({**fields, **fixed})


def transport_failure(error: httpx.HTTPError, *, streaming: bool) -> Failure:
    """Return the failure of a request without a complete response. `streaming`: whether the response had begun."""
    if isinstance(error, httpx.TimeoutException):
        kind = "timeout"
    elif streaming:
        kind = "broken stream"
    elif isinstance(error, httpx.ConnectError):
        kind = "no connection"
    else:
        kind = "connection lost before the response"
    return Failure(kind, repr(error)[:TEXT_CHARS_MAX])
