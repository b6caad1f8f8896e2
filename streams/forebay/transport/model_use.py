"""Find out which model cards the workers of a system use, and remove the others."""

import asyncio
from collections.abc import Iterable, Mapping

from forebay.events.heartbeats import RouterHeartbeat
from forebay.transport.base import Log, LogError
from forebay.transport.heartbeats import RouterHeartbeats
from forebay.transport.models import ModelStore

HEARTBEATS_S = 2.5  # an owner writes four heartbeats per second


class UseUnknown(LogError):
    """A group has no owner, so nobody knows which card its workers use."""


async def cards_in_use(log: Log, partitions: Mapping[str, int]) -> dict[str, str]:
    """Return the digest of the card that the workers of each group use; groups without a card are left out.

    Raises UseUnknown if a group has no owner, or LogError.
    """
    owners = await asyncio.gather(*(_owner_of(log, group, number) for group, number in partitions.items()))
    unknown = [group for group, owner in zip(partitions, owners, strict=True) if owner is None]
    if unknown:
        raise UseUnknown(
            f"no router owns {', '.join(unknown)} now, so it is unknown which model cards its workers use; start a"
            " router and try again"
        )
    return {owner.group: owner.card for owner in owners if owner is not None and owner.card}


def superseded_by(store: ModelStore, model: str, digest: str) -> list[str]:
    """Return the cards of a model that were stored before this one, if stored; newer cards may be for later use."""
    stored = list(store.cards)
    before = stored[: stored.index(digest)] if digest in store.cards else []
    return [one for one in before if store.cards[one].model == model]


async def remove_unused(
    log: Log, store: ModelStore, partitions: Mapping[str, int], digests: Iterable[str]
) -> list[str]:
    """Remove those of the cards that no worker uses, and return their digests. Raises as `cards_in_use`."""
    wanted = list(digests)
    if not wanted:
        return []
    used = set((await cards_in_use(log, partitions)).values())
    unused = [digest for digest in wanted if digest in store.cards and digest not in used]
    if unused:
        await store.remove(unused)
    return unused


async def _owner_of(log: Log, group: str, partition: int) -> RouterHeartbeat | None:
    """Return the next heartbeat of the owner of a group, None if there is none."""
    heartbeats = RouterHeartbeats(log, group)
    following = asyncio.create_task(heartbeats.follow(partition))
    try:
        async with asyncio.timeout(HEARTBEATS_S):
            while heartbeats.owner is None and not following.done():
                heartbeats.changed.clear()
                await asyncio.wait(
                    (following, waiting := asyncio.create_task(heartbeats.changed.wait())),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                waiting.cancel()
    except TimeoutError:
        return None
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    if heartbeats.owner is None:
        following.result()  # raises the error of the log
    return None if heartbeats.owner is None or heartbeats.owner.released else heartbeats.owner
