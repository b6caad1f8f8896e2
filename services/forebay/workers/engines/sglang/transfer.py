"""Descriptors with which an SGLang decode engine connects to a prefill engine. This module does not import SGLang.

Both engines identify a request by a room number. The prefill engine computes a prompt only after the decode engine has
connected with the number. The descriptor is therefore published as soon as the number is drawn, before the prompt is
computed.
"""

import secrets
from typing import Annotated

import msgspec

from forebay.events.codec import MALFORMED
from forebay.events.transfer import Prefilled
from forebay.workers.engines.kv_descriptor import Unfetchable, fetchable

CONNECTOR = "sglang"
LEASE_S = 120.0  # time until the decode engine has connected, including its queue, and the prompt is computed
PREFILL_SAMPLING = {"max_new_tokens": 1, "min_new_tokens": 0}
ROOM_BITS = 62


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptor of the KV of one request: the address of the prefill engine, and the room number.

    Attributes:
        room: number that identifies the request. Modulo the number of ranks it is the rank of the prefill engine.
    """

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    room: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

    def arguments(self) -> dict[str, str | int]:
        """Return the arguments of SGLang's `async_generate` for this descriptor."""
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}


def new_room(rank: int, dp_size: int) -> int:
    """Return a random room number for a request on one rank."""
    return secrets.randbits(ROOM_BITS) // dp_size * dp_size + rank


def rendezvous(prefilled: Prefilled | None, model: str, prompt_tokens: int) -> Rendezvous:
    """Return the decoded KV descriptor of a request.

    Raises Unfetchable if there is no descriptor, it cannot be decoded, or it is for another model or prompt length.
    """
    packed = fetchable(prefilled, CONNECTOR, model, prompt_tokens).descriptor
    try:
        return msgspec.json.decode(packed, type=Rendezvous)
    except MALFORMED as error:
        raise Unfetchable(f"cannot decode the KV descriptor: {error}") from error
