"""Client of the group of one model: sends requests, commands and settings to the owner. It needs no tokenizer."""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence
from functools import partial

from forebay import runtime
from forebay.events.base import Event
from forebay.events.codec import encode
from forebay.events.request_ids import RequestLocation
from forebay.events.requests import RESUME_GRACE_S, RequestCancelled, RequestResumed, RequestSubmitted
from forebay.events.tokens import RouteResponse
from forebay.events.topics import REQUESTS
from forebay.events.versions import may_write
from forebay.ingress.adapters import Adapters
from forebay.ingress.admission import POOL_FULL, FullPool
from forebay.ingress.commands import CommandClient
from forebay.ingress.drain import SHUTTING_DOWN
from forebay.ingress.errors import ApiError, no_router
from forebay.ingress.front import Front
from forebay.ingress.pool_settings import PoolConfigurator
from forebay.ingress.prepare import PreparedRequest, submissions
from forebay.ingress.settings import IngressSettings
from forebay.ingress.streams import Stream
from forebay.transport.base import Draft, LogError, LogFull
from forebay.transport.directory import Directory
from forebay.transport.heartbeats import OwnerPresence

logger = logging.getLogger(__name__)

POLL_S = 1.0  # seconds between two checks whether prompts must be computed by prefill workers
NO_OWNER = "no router owns this model now: a failover is in progress, or Kafka does not respond; try again soon"
NO_WORKER = "no worker is ready"
NO_PREFILL_WORKER = "no prefill worker is ready, and decode workers must not compute prompts"
ACKNOWLEDGED_S = 5.0  # a healthy broker takes milliseconds; after this time the client should retry
# A request that is not acknowledged after CHECKED_S fails if the owner's last heartbeat is older than SILENT_S. The
# broker has then accepted nothing from two processes, so it is probably unreachable. An owner writes four heartbeats
# per second.
CHECKED_S = 0.9
SILENT_S = 0.75
QUERY_S = 10.0  # for a route query: longer than a failover
QUEUE_CODES = frozenset({POOL_FULL, "queue_full", "queue_timeout"})


class Readiness:
    """Whether an ingress can serve: its group has a partition, an owner and a ready worker that generates responses.

    The owner's heartbeats contain the number of ready workers per role. If prompts must be computed by prefill workers
    (`is_enforced`), a prefill worker must be ready, too. `details` are more fields of the response to `GET /ready`.
    """

    def __init__(self, presence: OwnerPresence, directory: Directory) -> None:
        self.presence = presence
        self.is_enforced = False
        self.details: dict[str, str] = {}
        self._directory = directory

    def __call__(self) -> bool:
        return self.problem() is None

    def partition(self) -> int | None:
        """Return the control partition of the group; None until a router has assigned one."""
        return self._directory.partition_of(self.presence.group)

    async def placed(self) -> int:
        """Return the control partition of the group once a router has assigned it."""
        return await self._directory.placed(self.presence.group)

    def problem(self) -> str | None:
        """Return why no request can be served now, None if requests can be served."""
        owner = self.presence.owner
        if self.partition() is None:
            return NO_WORKER
        if owner is None or not self.presence.has_owner:
            return NO_OWNER
        if owner.ready_aggregated:
            return None
        if not owner.ready_decode:
            return NO_WORKER
        return NO_PREFILL_WORKER if self.is_enforced and not owner.ready_prefill else None


class GroupClient:
    """Sends requests, commands and settings of one model to its owner, and knows whether the model can be served.

    Attributes:
        full: whether the queue of the model's pool is assumed to be full.
    """

    def __init__(self, front: Front, settings: IngressSettings, ready: Readiness, full: FullPool | None = None) -> None:
        log, name = front.log, settings.model_name
        self.front = front
        self.settings = settings
        self.metrics = front.metrics.of_model(name)
        self.ready = ready
        self.replies = front.slot.reader(name)
        self.full = FullPool(lambda: len(self.replies)) if full is None else full
        self.pools = PoolConfigurator(log, ready.partition, self.metrics.undecodable.inc)
        self.pools.allowed_policies = self._allowed_policies
        self.pools.owner_events = lambda: 1 if (owner := ready.presence.owner) is None else owner.events_version
        self.commands = CommandClient(log, self.replies, name, settings.reply_slot, self.require_owner)
        self.adapters = Adapters(log, self.commands, name, settings.loras, ready.partition)

    async def run(self) -> None:
        """Follow the owner and the settings of the group until cancelled. Raises LogError if the log fails."""
        try:
            partition = await self.ready.placed()  # without one there are no settings yet
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_settings())
                await self.ready.presence.follow(partition)
        finally:
            self.adapters.close()

    async def _follow_settings(self) -> None:
        while True:
            with contextlib.suppress(ApiError):  # if the settings cannot be read, keep the previous ones
                self.ready.is_enforced = await self.has_enforced_prefill()
            await asyncio.sleep(POLL_S)

    def require_partition(self) -> int:
        """Return the partition of the model's control topics. Raises ApiError (503) while it has no router."""
        partition = self.ready.partition()
        if partition is None:
            raise no_router(self.settings.model_name)
        return partition

    def has_owner(self) -> bool:
        return self.ready.partition() is not None and self.ready.presence.has_owner

    def require_owner(self) -> int:
        """Return the partition of the model's control topics. Raises ApiError (503) while the model has no owner."""
        partition = self.require_partition()
        if not self.ready.presence.has_owner:
            raise ApiError(503, "no_owner", NO_OWNER)
        return partition

    def require_capacity(self, endpoint: str, tenant: str = "") -> None:
        """Raise ApiError (429), and count it for this endpoint, if the pool is assumed to be full for it.

        Of the only model, the admission has checked that before it read the body. Requests of the Kafka API wait in the
        router's queue instead.
        """
        admission = self.front.admission
        if self.full is not admission.full and tenant in self.full:
            self.metrics.rejected(endpoint)
            raise self.full.error(admission.retry_after_s)

    async def has_enforced_prefill(self) -> bool:
        """Return whether requests are rejected while no prefill worker is ready. Raises ApiError (503)."""
        model = self.settings.model_name
        pools = (await self.pools.configured()).values()
        return any(
            pool.model == model and pool.role == "decode" and disagg.enforce and disagg.policy == "always"
            for pool in pools
            for disagg in [pool.router.disagg]
        )

    def submissions(self, request_id: str, prepared: Sequence[PreparedRequest]) -> list[RequestSubmitted]:
        """Return the events that submit all parts of a request with a unique id."""
        settings, at_us = self.settings, runtime.wall_us()
        return submissions(
            request_id,
            prepared,
            nonce=runtime.random_int(8),
            reply_slot=settings.reply_slot,
            reply_from=self.replies.position,
            at_us=at_us,
            created_s=at_us // 1_000_000,
            ingress_id=settings.ingress_id,
            incarnation=settings.incarnation,
        )

    async def submit(self, event: RequestSubmitted, stream: Stream | None = None) -> Stream:
        """Append a request to the log, and return the stream of its output, which has its location then.

        Raises ApiError: 413 if the request is too large for a record, 503 if there is no router or the log fails.
        """
        partition, request_id = self.require_partition(), event.request_id
        stream = self.replies.add(request_id, stream or Stream(event.reply_key))
        try:
            stream.location = RequestLocation(partition, await self._append(partition, request_id, event))
        except BaseException as error:
            self.replies.close(request_id)
            if isinstance(error, asyncio.CancelledError):  # the append continues, but nobody reads its response
                self.cancel(request_id, "the server is stopping", output_tokens=0)
            raise
        return stream

    async def query(self, request_id: str, prepared: PreparedRequest) -> RouteResponse:
        """Return which worker the owner would select for a request with a unique id.

        Raises ApiError if the owner rejects the request or does not respond in time, or the log fails.
        """
        partition = self.require_partition()
        slot, nonce = self.settings.reply_slot, runtime.random_int(8)
        event = prepared.query(request_id, reply_slot=slot, nonce=nonce, at_us=runtime.wall_us())
        wait_s = min(QUERY_S, self.settings.timeout_s)
        send = partial(self._append, partition, request_id, event)
        return await self.replies.call(RouteResponse, request_id, event.reply_key, send, wait_s)

    def observe(self, error: ApiError, tenant: str = "") -> ApiError:
        """Return an error of the owner, with the estimated time for a retry if it concerns the router's queue.

        If the queue of the pool is full, new requests of the tenant are rejected for a short time.
        """
        if error.code == POOL_FULL:
            self.full.mark(tenant)
        if error.code in QUEUE_CODES:
            error.retry_after_s = self.front.admission.retry_after_s
        return error

    def cancel(
        self,
        request_id: str,
        reason: str,
        *,
        is_complete: bool = False,
        unless_resumed: bool = False,
        output_tokens: int | None = None,
    ) -> None:
        """Append the cancellation of a request to the log. If the log fails, only log a warning.

        Args:
            is_complete: whether the client has its complete response.
            unless_resumed: whether the event has no effect if a client has resumed the response at another ingress.
            output_tokens: number of output tokens that the client has got; None if that is unknown.
        """
        event = RequestCancelled(
            request_id=request_id,
            reason=reason,
            at_us=runtime.wall_us(),
            ingress_incarnation=self.settings.incarnation if unless_resumed else "",
            is_complete=is_complete,
            output_tokens=output_tokens,
        )
        try:
            self.front.log.append_soon([_draft(self.require_partition(), request_id, event)])
        except (LogError, ApiError) as error:  # the group may have been removed
            logger.warning("cannot cancel request %s: %s", request_id, error)

    def cancel_later(self, request_id: str, reason: str, output_tokens: int | None = None) -> None:
        """Cancel a request after the grace time, unless a client reads its response again here or elsewhere.

        When this process stops, the owner does that once it has lost the lease.
        """
        if reason == SHUTTING_DOWN:
            if not self.settings.has_lease:
                self.cancel(request_id, reason, unless_resumed=True, output_tokens=output_tokens)
            return
        cancel = partial(self.cancel_unread, request_id, reason, output_tokens)
        asyncio.get_running_loop().call_later(RESUME_GRACE_S, cancel)

    def cancel_unread(self, request_id: str, reason: str, output_tokens: int | None = None) -> None:
        """Cancel a request unless a client reads its response here or elsewhere."""
        if not self.front.slots.is_read(self.settings.model_name, request_id):
            self.cancel(request_id, reason, unless_resumed=True, output_tokens=output_tokens)

    def resume(self, request_id: str) -> None:
        """Append that a client reads the response of a request at this ingress, too, if the owner can read that."""
        owner, settings = self.ready.presence.owner, self.settings
        if owner is not None and may_write(RequestResumed, owner.events_version):
            event = RequestResumed(
                request_id=request_id, ingress_incarnation=settings.incarnation, at_us=runtime.wall_us()
            )
            self.front.log.append_soon([_draft(self.require_partition(), request_id, event)])

    def _allowed_policies(self) -> Collection[str] | None:
        owner = self.ready.presence.owner
        return None if owner is None else owner.policies

    async def _append(self, partition: int, request_id: str, event: Event) -> int:
        try:
            async with asyncio.timeout(None) as limit:
                check = asyncio.get_running_loop().call_later(CHECKED_S, self._check_owner, limit)
                try:
                    (offset,) = await self.front.log.append([_draft(partition, request_id, event)])
                    return offset
                finally:
                    check.cancel()
        except TimeoutError as error:
            # The log may still append the request after the client has gone.
            self.cancel(request_id, "log_unavailable", output_tokens=0)
            text = "Kafka did not acknowledge the request in time; try again soon"
            raise ApiError(503, "log_unavailable", text) from error
        except LogFull as error:
            raise ApiError(503, "log_unavailable", f"{error}; try again soon") from error
        except LogError as error:
            # A failed log does not recover, so all other requests would only reach their deadline.
            self.front.slots.interrupt_all(str(error))
            raise ApiError(503, "log_unavailable", str(error)) from error
        except ValueError as error:
            raise ApiError(413, "request_too_large", str(error)) from error

    def _check_owner(self, limit: asyncio.Timeout) -> None:
        """End the wait for an acknowledgement now if the owner is silent, too, otherwise after `ACKNOWLEDGED_S`."""
        left_s = 0.0 if (self.ready.presence.owner_age_s or 0.0) > SILENT_S else ACKNOWLEDGED_S - CHECKED_S
        limit.reschedule(asyncio.get_running_loop().time() + left_s)


def _draft(partition: int, request_id: str, event: Event) -> Draft:
    return Draft(REQUESTS.name, partition, encode(REQUESTS, event), request_id.encode())
