"""Markers of a planner's decisions and of orders to it, which are on the topic `scaling` and not in the journal."""

from forebay.events.codec import DecodeError, decode
from forebay.events.scaling import PlannerPaused, PoolSizeSet, ScalingDecided, ScalingEvent
from forebay.events.topics import SCALING
from forebay.replay.catalog.facts import Marker
from forebay.replay.catalog.markers import add_markers
from forebay.replay.catalog.store import Store
from forebay.replay.scaling.journal import PARTITION, has_scaling, pool_text
from forebay.transport.base import Log
from forebay.transport.history.reader import records_of

RECORDS_MAX = 10_000  # records that one call reads: about 50 ms of work
POOLS_MAX = 3  # pools in a sentence
_POSITION = "scaling_offset"  # offset of the first record that is not in the catalog


async def add_scaling_markers(store: Store, log: Log, group: str) -> bool:
    """Add the markers of at most `RECORDS_MAX` further records to a catalog. Return whether there were any records.

    Only the pools of `group` count; empty for all groups.
    """
    if not await has_scaling(log):
        return False
    offset = int(store.meta(_POSITION) or 0)
    begin = max(offset, await log.begin(SCALING.name, PARTITION))
    end = max(begin, min(begin + RECORDS_MAX, await log.end(SCALING.name, PARTITION)))
    if end == offset:
        return False
    found = []
    async for record in records_of(log, SCALING, PARTITION, begin, end):
        try:
            event: ScalingEvent = decode(SCALING, record.value)
        except DecodeError:
            continue
        if text := _text(event, group):
            at_us = event.at_us or record.at_us
            found.append(Marker(at_us=at_us, kind="scaling", text=text, topic=SCALING.name, offset=record.offset))
    with store.transaction() as connection:
        add_markers(connection, found)
        store.set_meta(_POSITION, str(end))
    return True


def _text(event: ScalingEvent, group: str) -> str:
    match event:
        case ScalingDecided():
            changes = [
                f"{pool_text((one.group, one.pool))} from {one.from_size} to {one.to_size} ({one.reason})"
                for one in event.pools
                if one.to_size != one.from_size and group in ("", one.group)
            ]
            more = len(changes) - POOLS_MAX
            named = ", ".join(changes[:POOLS_MAX]) + (f" and {more} more pools" if more > 0 else "")
            if changes:
                return f"The planner {'recommends to scale' if event.advisory else 'scales'} {named}."
        case PoolSizeSet() if group in ("", event.group):
            pool = pool_text((event.group, event.pool))
            if event.size is None:
                return _sentence(f"Pool {pool} was released to the planner", event.operator)
            return _sentence(f"Pool {pool} was set to {event.size} workers", event.operator)
        case PlannerPaused():
            return _sentence(f"The planner was {'paused' if event.paused else 'resumed'}", event.operator)
    return ""


def _sentence(text: str, operator: str) -> str:
    return f"{text} (by {operator})." if operator else f"{text}."
