"""Clients of a simulated gateway: a picker routes their requests, and servers outside of forebay answer them."""

import asyncio
from random import Random
from typing import Any

import msgspec

from forebay.events.base import unpack_u32
from forebay.events.request_ids import client_id_of
from forebay.ingress.errors import ApiError
from forebay.ingress.group import GroupClient
from forebay.ingress.openai.requests import TEXT_PATH
from forebay.picker.answer import EVENT_STREAM
from forebay.picker.exchange import ADDRESS, OK, SERVER_ERROR, SERVER_LOST, TOO_MANY, Exchange
from forebay.picker.messages import FULL_DUPLEX, ProcessingRequest, metadata
from tests.faults.clients import Client
from tests.faults.effects import Violation
from tests.faults.services import GROUP, endpoint_of

PARTS_MAX = 12  # of an answer
PART_S = 0.1  # mean time between two parts
REUSED = 0.7  # chance that the gateway uses the server that the owner selected
STATUSES = (OK, TOO_MANY, SERVER_ERROR, 400)
UNKNOWN = "unknown:8000"  # a server without a worker


class ExternalClient(Client):
    """One client of a gateway. Its picker is the ingress of the plan."""

    def check(self) -> None:
        """Check that the picker submitted the request once, or twice if the first server was lost early.

        It must also have cancelled the request if the answer was cut off. Raises Violation.
        """
        outcome, checks = self.outcome, self._cluster.checks
        ids = [one for one in checks.effects.external if client_id_of(one) == outcome.name]
        reasons = [checks.aborted.get(one, "") for one in ids[:-1]]
        if reasons not in ([], [SERVER_LOST]):
            raise Violation(f"{outcome.name} was submitted as {ids} after {reasons}")
        is_ended = bool(ids) and (ids[-1] in checks.cancelled or ids[-1] in checks.aborted)
        if outcome.state == "disconnected" and self._could_cancel and not is_ended:
            raise Violation(f"lost effect: {outcome.name} was not cancelled, although its gateway went away")

    async def _request(self, group: GroupClient) -> None:
        """Do what the server of the picker does with the messages of a gateway."""
        outcome, exchange = self.outcome, None
        found = self._cluster.ingress(self._planned.ingress)
        assert found is not None
        assert found[1].fallback is not None
        self._cluster.fired["external"] += 1
        try:
            exchange = Exchange(found[1].fallback)
            await self._exchange(exchange)
        except ApiError as error:
            outcome.state, outcome.detail = "failed", error.code
        finally:
            if exchange is not None:
                exchange.close()

    async def _exchange(self, exchange: Exchange) -> None:
        outcome, planned = self.outcome, self._planned
        random = Random(f"{self._cluster.plan.seed}/{outcome.name}")
        modes = {"request_body_mode": FULL_DUPLEX, "response_body_mode": FULL_DUPLEX}
        headers = _headers({":path": TEXT_PATH, "x-request-id": outcome.name})
        await exchange.respond(ProcessingRequest(request_headers=headers, protocol_config=modes))
        prompt = unpack_u32(outcome.prompt)
        body = {"model": GROUP, "prompt": prompt, "max_tokens": planned.max_tokens, "stream": True}
        message = ProcessingRequest(request_body={"body": msgspec.json.encode(body), "end_of_stream": True})
        first, *_ = await exchange.respond(message)
        (header,) = first.request_headers.response.header_mutation.set_headers
        selected = served = header.header.raw_value.decode().split(",")[0]
        workers = [name for name in self._cluster.members if name[0] == "w"]
        if random.random() > REUSED:
            served = random.choice([*map(endpoint_of, workers), UNKNOWN])
        self._cluster.fired["moved"] += served != selected
        await asyncio.sleep(random.expovariate(1 / PART_S))
        status = random.choices(STATUSES, (8, 1, 1, 1))[0]
        headers = _headers({":status": str(status), "content-type": EVENT_STREAM})
        address = metadata(*ADDRESS, served)["fields"]
        attributes = [{"key": one["key"], "value": one["value"]["struct_value"]} for one in address]
        await exchange.respond(ProcessingRequest(response_headers=headers, attributes=attributes))
        parts = random.randint(1, PARTS_MAX)
        ends_at = random.randrange(parts) if planned.disconnect_ms is not None else parts
        for number in range(ends_at):
            await asyncio.sleep(random.expovariate(1 / PART_S))
            await _pass(exchange, {"choices": [{"text": f"{number}"}]}, is_last=False)
        if ends_at < parts:
            self._cluster.fired["disconnect"] += 1
            outcome.state = "disconnected"
            return
        await _pass(exchange, {"choices": [], "usage": {"completion_tokens": parts}}, is_last=True)
        outcome.state, outcome.detail = "answered", str(status)


async def _pass(exchange: Exchange, event: dict[str, Any], *, is_last: bool) -> None:
    body = b"data: %s\n\n" % msgspec.json.encode(event)
    await exchange.respond(ProcessingRequest(response_body={"body": body, "end_of_stream": is_last}))


def _headers(headers: dict[str, str]) -> dict[str, Any]:
    return {"headers": {"headers": [{"key": name, "raw_value": value.encode()} for name, value in headers.items()]}}
