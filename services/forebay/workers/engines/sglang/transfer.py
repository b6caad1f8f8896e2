"""Descriptors of SGLang's rendezvous between a prefill and a decode engine. Pure: SGLang is not imported here.

The prefill engine computes a prompt only after the decode engine has connected with the same room number. The
descriptor is therefore published as soon as the room is chosen, before the prompt is computed.
"""

import secrets
from typing import Annotated

import msgspec

from forebay.events.codec import MALFORMED
from forebay.events.transfer import Prefilled
from forebay.workers.engines.kv_descriptor import Unfetchable, fetchable

CONNECTOR = "sglang"
LEASE_S = 120.0  # for the decode engine to connect, including its queue, and for the prompt to be computed
PREFILL_SAMPLING = {"max_new_tokens": 1, "min_new_tokens": 0}
ROOM_BITS = 62


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the prefill engine. `room` identifies the request, and modulo dp_size its rank."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    room: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

    def arguments(self) -> dict[str, str | int]:
        """Return the arguments of `async_generate`."""
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}


def new_room(rank: int, dp_size: int) -> int:
    """Return a new random room for a rank, counted from 0, of `dp_size` ranks."""
    return secrets.randbits(ROOM_BITS) // dp_size * dp_size + rank


def rendezvous(prefilled: Prefilled | None, model: str, prompt_tokens: int) -> Rendezvous:
    """Decode the rendezvous for a whole prompt. Raises Unfetchable."""
    packed = fetchable(prefilled, CONNECTOR, model, prompt_tokens).descriptor
    try:
        return msgspec.json.decode(packed, type=Rendezvous)
    except MALFORMED as error:
        raise Unfetchable(f"cannot decode the KV descriptor: {error}") from error
