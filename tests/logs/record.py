"""Regenerate the recordings of this folder, or only the named ones. `make golden` runs this program.

Run it after `CORE_VERSION` was raised or a scenario changed. The recordings come from the real owner in virtual time
and are anonymised like those of `forebay record --anonymize`.
"""

import asyncio
import sys
from pathlib import Path

from forebay.events.topics import DECISIONS
from forebay.journal.snapshots import snapshots_taken
from forebay.replay.anonymize.anonymize import record_anonymized
from forebay.replay.record.slice import Window, contents_of, slice_of
from forebay.runtime import use
from forebay.transport.sqlite.log import SqliteLog
from tests.logs import disaggregation, incidents, routing, scaling
from tests.logs.playing import SCENARIOS
from tests.logs.stage import MODEL, StoppedTime

__all__ = ["FOLDER", "SCENARIOS", "SUFFIX", "record"]

PLAYED = (disaggregation, incidents, routing)  # they put their scenarios into the list
FOLDER = Path(__file__).parent
SUFFIX = ".rec"
FROM_SNAPSHOT = frozenset({"from-snapshot"})  # these start at a snapshot


async def record(name: str, out: Path) -> None:
    """Play one scenario and write its recording."""
    with use(StoppedTime()):
        stage = await SCENARIOS[name]()
        await stage.owner.close()  # seals the state, so that events applied after the last decision are recorded
    try:
        window = Window(await _begin_us(stage.log)) if name in FROM_SNAPSHOT else Window()
        slices = [await slice_of(stage.log, MODEL, 0, window)]
        contents = await contents_of(
            stage.log, slices, namespace=stage.log.namespace, source="log", asked={}, anonymized=True
        )
        await record_anonymized(stage.log, out, contents, custom=stage.owner.world.custom)
    finally:
        stage.log.close()


async def _begin_us(log: SqliteLog) -> int:
    """Return the time at which the first snapshot was journalled."""
    places = [offset async for offset, _ in snapshots_taken(log, 0, 0, log.next_offset(DECISIONS.name, 0))]
    return log.records(DECISIONS.name, 0, places[0], 1)[0].at_us


def main(names: list[str]) -> None:
    """Write the named recordings, or all, and remove recordings without a scenario."""
    known = [*SCENARIOS, scaling.PATH.stem]
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"there is no scenario {unknown[0]}; there are {', '.join(sorted(known))}")
    for name in names or known:
        if name == scaling.PATH.stem:
            sys.stdout.write(f"{scaling.PATH.name:<28} {scaling.write_scaling():>8} bytes\n")
            continue
        out = FOLDER / f"{name}{SUFFIX}"
        out.unlink(missing_ok=True)
        asyncio.run(record(name, out))
        sys.stdout.write(f"{out.name:<28} {out.stat().st_size:>8} bytes\n")
    if not names:
        for path in FOLDER.glob(f"*{SUFFIX}"):
            if path.stem not in SCENARIOS:
                path.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
