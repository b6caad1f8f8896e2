"""SGLang's rendezvous of a prefill and a decode engine as a descriptor. Pure: SGLang is not imported here.

Its prefill engine computes a prompt only once the decode engine has come to the room that the request names. So a
prompt is told of as soon as it has a room, and computed while the other side waits for it there.
"""

import secrets
from typing import Annotated

import msgspec

from forebay.events.codec import MALFORMED
from forebay.events.transfer import Prefilled
from forebay.workers.engines.kv_descriptor import Unfetchable, fetchable

CONNECTOR = "sglang"
LEASE_S = 120.0  # for the decode engine to come, and for the prompt to be computed: the queue of the other is in it
PREFILL_SAMPLING = {"max_new_tokens": 1, "min_new_tokens": 0}
ROOM_BITS = 62


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where the two meet; `room` names the request there, and the prefill engine's rank by what it leaves over."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    room: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

    def arguments(self) -> dict[str, str | int]:
        """Of `async_generate`."""
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}


def new_room(rank: int, dp_size: int) -> int:
    """One that nobody has, for a rank of so many; counted from 0."""
    return secrets.randbits(ROOM_BITS) // dp_size * dp_size + rank


def rendezvous(prefilled: Prefilled | None, model: str, prompt_tokens: int) -> Rendezvous:
    """Where to meet who computes a prompt. Raises Unfetchable."""
    packed = fetchable(prefilled, CONNECTOR, model, prompt_tokens).descriptor
    try:
        return msgspec.json.decode(packed, type=Rendezvous)
    except MALFORMED as error:
        raise Unfetchable(f"the descriptor of its KV is broken: {error}") from error
