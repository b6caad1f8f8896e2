"""Find effects that a new owner must not send again, because a later request or command uses the same id."""

from forebay.core.phases import Phase
from forebay.core.world import World
from forebay.events.decisions import CommandEnded, CommandSent, KvReleased, RequestAborted, RequestRejected
from forebay.live.router.standby import Unconfirmed


def is_superseded(world: World, decided: Unconfirmed) -> bool:
    """Return whether another request or command uses the same id, so that the effect would end it."""
    if isinstance(decided, CommandSent | CommandEnded):
        return world.commands.get(decided.command_id) is not None
    if not isinstance(decided, RequestRejected | RequestAborted | KvReleased):
        return False
    request = world.requests.get(decided.request_id)
    if isinstance(decided, RequestRejected):
        # The other request may be the older one because of which this one was rejected, for another client.
        return request is not None and request.submitted.reply_slot == decided.reply_slot
    if request is None or not isinstance(decided, KvReleased):
        return request is not None
    has_kv = request.prefilled is not None or request.phase is Phase.REMOTE_PREFILL
    return has_kv and request.prefills <= decided.attempt
