"""What `forebay top` shows, read from a console or an ingress over HTTP."""

import asyncio
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import httpx
import msgspec

from forebay.cli.common.failures import advice
from forebay.cli.console.run import VARIABLE
from forebay.console.console import ConsoleInfo, FleetView
from forebay.replay.catalog.facts import CatalogState, MetricSeries, RequestPage, RequestRow, WorkerActivity
from forebay.replay.explain.explanation import Explanation
from forebay.replay.status import GroupStatus

REQUESTS_MAX = 100  # rows that a terminal can scroll through; a filter finds older requests
INTERVAL_US = 5_000_000
INTERVALS = 60  # five minutes, and as many columns of a terminal
EXPLAINED_WITHIN_S = 90.0  # longer than the limit of a console

T = TypeVar("T")


class SourceError(Exception):
    """A console or an ingress cannot be read. The message is for users.

    Attributes:
        is_missing: whether the server does not know the path.
    """

    def __init__(self, message: str, *, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_missing = is_missing


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that the screen shows at one time.

    Attributes:
        problems: what is wrong, one sentence each.
        activity: activity of the workers in the last minute, by worker ID. Empty from an ingress.
        requests: newest requests that match the filter. None from an ingress, which has no list.
        series: metrics over time. None from an ingress.
        catalog: how far the console has followed the log. None from an ingress.
    """

    status: GroupStatus
    problems: list[str]
    activity: dict[str, WorkerActivity]
    requests: list[RequestRow] | None = None
    series: MetricSeries | None = None
    catalog: CatalogState | None = None


class Source:
    """A console or an ingress.

    Args:
        client: HTTP client with the address and the token of the server.

    Attributes:
        is_console: whether the server is a console. Known after `connect`.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.is_console = True

    async def connect(self) -> None:
        """Find out whether the server is a console or an ingress. Raises SourceError."""
        try:
            await self._get("/v1/console", ConsoleInfo)
        except SourceError as error:
            if not error.is_missing:
                raise
            await self._get("/v1/status", GroupStatus)
            self.is_console = False

    async def read(self, filters: dict[str, str]) -> Snapshot:
        """Read everything that the screen shows.

        Args:
            filters: query parameters of `GET /v1/console/requests`.

        Raises:
            SourceError: the server does not respond, or it responded with an error.
        """
        if not self.is_console:
            status = await self._get("/v1/status", GroupStatus)
            return Snapshot(status, status.problems, {})
        about, fleet, page = await asyncio.gather(
            self._get("/v1/console", ConsoleInfo),
            self._get("/v1/console/fleet", FleetView),
            self._get("/v1/console/requests", RequestPage, {"limit": str(REQUESTS_MAX), **filters}),
        )
        return Snapshot(
            status=fleet.status,
            problems=fleet.problems,
            activity={worker.worker_id: worker for worker in fleet.workers},
            requests=page.requests,
            series=await self._series(fleet.at_us),
            catalog=about.state,
        )

    async def explain(self, request: RequestRow) -> Explanation:
        """Explain the routing decisions about a request. Raises SourceError."""
        path = f"/v1/requests/{quote(request.request_id, safe='')}/explain"
        return await self._get(path, Explanation, {"number": str(request.number)}, timeout_s=EXPLAINED_WITHIN_S)

    async def _series(self, at_us: int) -> MetricSeries | None:
        """Return the metrics of the last complete intervals; None for a log without events."""
        end_us = at_us - at_us % INTERVAL_US
        if end_us <= 0:
            return None
        span_us = {"from_us": str(max(0, end_us - INTERVALS * INTERVAL_US)), "to_us": str(end_us)}
        return await self._get("/v1/console/series", MetricSeries, {**span_us, "points": str(INTERVALS)})

    async def _get(
        self, path: str, kind: type[T], params: dict[str, str] | None = None, timeout_s: float | None = None
    ) -> T:
        url = self._client.base_url
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
        try:
            response = await self._client.get(path, params=params, timeout=timeout)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise SourceError(f"{url} does not respond ({error!r}); {advice(error)}") from error
        if response.status_code != httpx.codes.OK:
            hint = ""
            if response.status_code == httpx.codes.UNAUTHORIZED:
                hint = f"; set {VARIABLE}, or use --token-file FILE"
            is_missing = response.status_code == httpx.codes.NOT_FOUND
            raise SourceError(f"{url}: {_message(response)}{hint}", is_missing=is_missing)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            text = f"{url}{path} returned another form than expected ({error})"
            raise SourceError(f"{text}; check --url, and use the same version of forebay") from error


def _message(response: httpx.Response) -> str:
    """Return the message of an error response."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"unexpected response, HTTP {response.status_code}"
