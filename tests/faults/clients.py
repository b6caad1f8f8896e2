"""Clients of the simulated ingresses."""

import asyncio

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import hash_seed, sequence_hashes
from forebay.events.base import U32_BYTES
from forebay.events.codec import encode
from forebay.events.rendering import Rendering
from forebay.events.requests import RequestSubmitted, RoutingHints
from forebay.events.topics import REQUESTS
from forebay.ingress.commands import GRACE_S
from forebay.ingress.errors import ApiError
from forebay.ingress.group import GroupClient
from forebay.ingress.prepare import PreparedRequest
from forebay.ingress.streams import Stream
from forebay.transport.base import Draft, LogError
from tests.faults.cluster import Cluster
from tests.faults.effects import Violation
from tests.faults.invariants import planned_outcome
from tests.faults.plan import PlannedRequest
from tests.faults.process import Process
from tests.faults.services import BLOCK, GROUP, PARTITION

PATIENCE_S = 8.0  # a client tries again for this long while its ingress is not ready
RETRY_S = 0.2
FOREIGN_SLOTS = 100  # first reply slot that no ingress reads
READ_TWICE = 4  # another client reads the responses of one in so many requests, at another ingress


class Client:
    """One client, which sends one request and reads the response. Another client may read it at another ingress."""

    def __init__(self, cluster: Cluster, planned: PlannedRequest, number: int) -> None:
        self.outcome = planned_outcome(planned, planned.repeats or planned.name)
        self._elsewhere = planned_outcome(planned, planned.name)
        self._cluster = cluster
        self._planned = planned
        self._number = number
        self._process: Process | None = None

    @property
    def is_done(self) -> bool:
        """Whether the client waits for nothing more. It gives up if the process of its ingress has ended."""
        outcome, process = self.outcome, self._process
        if outcome.state == "pending" and process is not None and not process.alive:
            outcome.state = "broken"
        return outcome.state not in ("waiting", "pending")

    async def run(self) -> None:
        """Send the request once the ingress is ready, trying again for `PATIENCE_S`."""
        if self._planned.repeats:
            self._append_repeated()
            return
        loop = asyncio.get_running_loop()
        gives_up_s = loop.time() + PATIENCE_S
        while loop.time() < gives_up_s:
            found = self._cluster.ingress(self._planned.ingress)
            if found is not None:
                process, service = found
                if service.group is not None and _is_ready(process, service.group):
                    self._process = process
                    self.outcome.state = "pending"
                    self.outcome.deadline_s = loop.time() + self._planned.timeout_ms / 1000
                    process.spawn(self._request(service.group))
                    return
            await asyncio.sleep(RETRY_S)
        self.outcome.state, self.outcome.detail = "rejected", "not_ready"

    def check(self) -> None:
        """Check that the ingress cancelled the request if its client disconnected. Raises Violation."""
        self._elsewhere.check()
        outcome, cancelled = self.outcome, self._cluster.checks.cancelled
        if outcome.state == "disconnected" and self._could_cancel and outcome.request_id not in cancelled:
            raise Violation(f"lost effect: {outcome.name} was not cancelled, although its client disconnected")

    @property
    def _could_cancel(self) -> bool:
        """Whether the ingress had room for a cancellation in its log. Otherwise the request ends by itself."""
        process = self._process
        return process is not None and process.alive and not self._cluster.fired["log_full"]

    def prepared(self) -> PreparedRequest:
        outcome = self.outcome
        return PreparedRequest(
            model=GROUP,
            token_ids=outcome.prompt,
            sequence_hashes=sequence_hashes(outcome.prompt, BLOCK, hash_seed(self._planned.lora, "")),
            prompt_tokens=len(outcome.prompt) // U32_BYTES,
            lora_name=self._planned.lora,
            cache_namespace="",
            media=(),
            sampling=outcome.sampling,
            routing=RoutingHints(),
            timeout_us=self._planned.timeout_ms * 1_000,
            rendering=Rendering(api="completions", model=GROUP, created_s=0),
        )

    def _append_repeated(self) -> None:
        """Append a request whose id is in use, and one whose idempotency key may be, as another producer may do.

        Nobody reads their responses.
        """
        self._cluster.fired["repeated_id"] += 1
        outcome = self.outcome
        outcome.state = "foreign"
        slot = FOREIGN_SLOTS + self._number
        for request_id, key in ((outcome.request_id, 0), (f"{outcome.name}-again", _key_of(self._planned.repeats))):
            event: RequestSubmitted = self.prepared().submission(
                request_id, reply_slot=slot, reply_from=0, nonce=1, at_us=0, ingress_id=""
            )
            value = encode(REQUESTS, replace(event, idempotency_key=key))
            self._cluster.broker.append(Draft(REQUESTS.name, PARTITION, value, request_id.encode()), 0)

    async def _request(self, group: GroupClient) -> None:
        """Do what the HTTP routes do: admit, submit, read the response, and cancel it if the client disconnects."""
        outcome = self.outcome
        try:
            group.require_owner()
            group.front.admission.enter()
        except ApiError as error:
            outcome.state, outcome.detail = "rejected", error.code
            return
        try:
            await self._respond(group)
        except ApiError as error:
            outcome.state, outcome.detail = "failed", error.code
        finally:
            group.front.admission.leave()

    async def _respond(self, group: GroupClient) -> None:
        outcome, planned = self.outcome, self._planned
        loop = asyncio.get_running_loop()
        (event,) = group.submissions(outcome.request_id, [self.prepared()])
        stream = await group.submit(replace(event, idempotency_key=_key_of(planned.name), key_id=planned.name))
        if self._number % READ_TWICE == 0:
            self._spawn_reader(event)
        timers = [loop.call_later(planned.timeout_ms / 1000 + GRACE_S, stream.interrupt, "deadline")]
        if planned.disconnect_ms is not None:
            timers.append(loop.call_later(planned.disconnect_ms / 1000, stream.interrupt, "disconnected"))
        try:
            while outcome.state == "pending":
                await stream.ready()
                outcome.tokens += stream.tokens
                stream.tokens.clear()
                if stream.gap:
                    outcome.state, outcome.detail = "failed", "tokens_missing"
                elif stream.ended is not None:
                    error = stream.ended.error
                    outcome.state = "finished" if error is None else "failed"
                    outcome.detail = stream.ended.finish_reason if error is None else error.code
                elif stream.located is not None:
                    outcome.state = "located"
                elif stream.interrupt_reason == "disconnected":
                    self._cluster.fired["disconnect"] += 1
                    outcome.state = "disconnected"
                elif stream.interrupt_reason is not None:
                    outcome.state, outcome.detail = "failed", stream.interrupt_reason
        finally:
            for timer in timers:
                timer.cancel()
            group.replies.close(outcome.request_id)
            if stream.ended is None and stream.interrupt_reason == "disconnected":
                group.cancel_unread(outcome.request_id, "disconnected", len(outcome.tokens))
            elif stream.ended is None:
                group.cancel(outcome.request_id, stream.interrupt_reason or "disconnected")

    def _spawn_reader(self, event: RequestSubmitted) -> None:
        for name in self._cluster.members:
            found = self._cluster.ingress(name) if name[0] == "i" and name != self._planned.ingress else None
            if found is not None and (group := found[1].group) is not None and _is_ready(found[0], group):
                found[0].spawn(self._read(group, event))
                return

    async def _read(self, group: GroupClient, event: RequestSubmitted) -> None:
        """Read the response as another ingress does for a client that resumes it."""
        self._cluster.fired["read_elsewhere"] += 1
        outcome, stream = self._elsewhere, Stream(event.reply_key)
        group.resume(event.request_id)
        view = await group.front.slots.view(event.reply_slot, GROUP, {event.request_id: stream}, event.reply_from)
        waits_s = self._planned.timeout_ms / 1000 + GRACE_S
        timer = asyncio.get_running_loop().call_later(waits_s, stream.interrupt, "deadline")
        try:
            is_over = False
            while not is_over:
                await stream.ready()
                outcome.tokens += stream.tokens
                stream.tokens.clear()
                is_over = view.has_ended or stream.located is not None
            if stream.ended is not None and stream.ended.error is None:
                outcome.state = "finished"
        finally:
            timer.cancel()
            group.front.slots.close(view)
            if stream.ended is None:
                group.cancel_unread(event.request_id, "disconnected")


def _key_of(name: str) -> int:
    """Return the idempotency key of the client that sends the request with this name."""
    return xxh3_64_intdigest(name.encode())


def _is_ready(process: Process, group: GroupClient) -> bool:
    try:
        return process.evaluate(group.ready)
    except LogError:  # the process is about to end
        return False
