"""Build another version of forebay from this tree, with other decision rules and further event types.

The other version is a copy of the sources with the replacements of `PATCH`. A replacement whose text occurs in the
sources not exactly once raises `PatchOutdated`, so a change of the sources cannot disable a part of the patch silently.
"""

import os
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from forebay.core.world import CORE_VERSION
from forebay.events.versions import EVENTS_VERSION

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("schemas", "streams", "services")
OTHER_VERSION = CORE_VERSION + 1
COST_NOTED = "cost.noted"  # tag of the journal records that only the other version writes
# Tag of events that a worker of the other version writes, once the owner can read them.
BATCH_MEASURED = "progress.batch_measured"


class PatchOutdated(Exception):
    """The text of a replacement does not occur exactly once in its file: adapt the patch to the sources."""


class Replacement(NamedTuple):
    """Replacement of a text in a file.

    Attributes:
        path: file, relative to the root of the tree.
        before: text that occurs once in the file.
    """

    path: str
    before: str
    after: str


_WORLD = "streams/forebay/core/world.py"
_COST = "streams/forebay/core/routing/cost.py"
_DECISIONS = "schemas/forebay/events/decisions.py"
_STEP = "streams/forebay/core/step.py"
_DISPATCH = "streams/forebay/core/dispatch.py"
_REDERIVE = "streams/forebay/core/rederive.py"
_EFFECTS = "streams/forebay/live/owner/effects.py"
_PROGRESS = "schemas/forebay/events/progress.py"
_OUTBOX = "services/forebay/workers/runtime/outbox.py"

# Decode load counts twice, so the cheapest candidate is another one wherever overlap and load contradict each other.
_COST_RULE = (
    Replacement(_WORLD, f"\nCORE_VERSION = {CORE_VERSION}  #", f"\nCORE_VERSION = {OTHER_VERSION}  #"),
    Replacement(
        _COST,
        "np.add(costs, decode, costs)",
        "np.add(costs, decode + decode, costs)",
    ),
)
_JOURNAL_TAG = (
    Replacement(
        _DECISIONS,
        "\n\nJournalRecord = (\n    OwnerClaimed\n",
        f'''

class CostNoted(Decision, tag="{COST_NOTED}", frozen=True, kw_only=True):
    """The cost of a decision."""

    request_id: Annotated[Name, REQUEST_ID]
    cost: float


JournalRecord = (
    OwnerClaimed
    | CostNoted
''',
    ),
    Replacement(
        _DISPATCH,
        "\nAnyDecision = (\n    RequestRouted\n",
        "\nfrom forebay.events.decisions import CostNoted\n\nAnyDecision = (\n    RequestRouted\n    | CostNoted\n",
    ),
    Replacement(
        _STEP,
        "    decided = _decide(world, event, offset)\n",
        """    decided = _decide(world, event, offset)
    from forebay.events.decisions import CostNoted, RequestRouted
    decided += [
        CostNoted(**world.stamp(), request_id=one.request_id, cost=one.terms.cost)
        for one in decided
        if isinstance(one, RequestRouted)
    ]
""",
    ),
    Replacement(
        _REDERIVE,
        "                | AdapterPlaced()\n            ):",
        "                | AdapterPlaced()\n                | decisions.CostNoted()\n            ):",
    ),
    Replacement(
        _REDERIVE,
        "\nfrom forebay.core.world import World\n",
        "\nfrom forebay.core.world import World\nfrom forebay.events import decisions\n",
    ),
    Replacement(
        _EFFECTS,
        "        case RequestHeld() | AdapterPlaced():\n            return []\n",
        "        case RequestHeld() | AdapterPlaced():\n            return []\n"
        f'        case _ if type(decided).__struct_config__.tag == "{COST_NOTED}":\n            return []\n',
    ),
)
_WORKER_TAG = (
    Replacement(
        _PROGRESS,
        "\n\nStageEnd = ",
        f'''

class BatchMeasured(Event, tag="{BATCH_MEASURED}", frozen=True, kw_only=True):
    """How many requests one step of the engine finished."""

    SINCE = {EVENTS_VERSION + 1}

    worker_id: SystemName
    finished: Count


StageEnd = ''',
    ),
    Replacement(
        _PROGRESS,
        "\nAnyProgressEvent = RequestProgress | ",
        "\nAnyProgressEvent = RequestProgress | BatchMeasured | ",
    ),
    Replacement(
        _STEP,
        "    match event:\n        case RequestSubmitted():\n",
        "    from forebay.events.progress import BatchMeasured\n"
        "    match event:\n"
        "        case BatchMeasured():\n"
        '            world.counts["batches_measured"] += 1\n'
        "        case RequestSubmitted():\n",
    ),
    Replacement(
        _OUTBOX,
        "        drafts += progress\n        drafts += self._stage_ends",
        """        drafts += progress
        from forebay.events.progress import BatchMeasured
        from forebay.events import versions
        if batch.finished and versions.may_write(BatchMeasured, self.owner_events):
            measured = BatchMeasured(worker_id=self._worker_id, finished=len(batch.finished))
            drafts.append(_draft(PROGRESS, self._partition, measured))
        drafts += self._stage_ends""",
    ),
)
PATCH: Sequence[Replacement] = (*_COST_RULE, *_JOURNAL_TAG, *_WORKER_TAG)


def build(folder: Path) -> str:
    """Write the other version to a new folder. Return its command, which takes the arguments of `forebay`.

    The command imports `forebay` only from the folder, and third-party packages from the environment of this process.

    Raises:
        PatchOutdated: The sources have changed so that the patch does not apply.
    """
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for one in PATCH:
        _apply(folder / one.path, one)
    return _write_command(folder)


def _apply(file: Path, one: Replacement) -> None:
    text = file.read_text()
    if text.count(one.before) != 1:
        raise PatchOutdated(
            f"{one.path} has the text to replace {text.count(one.before)} times, expected once: {one.before!r}"
        )
    file.write_text(text.replace(one.before, one.after))


def _write_command(folder: Path) -> str:
    own = [str(ROOT / name) for name in SOURCES]
    other = [str(folder / name) for name in SOURCES]
    command = folder / "forebay"
    command.write_text(
        f"""#!{sys.executable}
import os, sys

sys.path[:] = {other} + [path for path in sys.path if path not in {own}]
os.environ["PYTHONPATH"] = {os.pathsep.join(other)!r}  # of child processes
if __name__ == "__main__":
    from forebay.cli.app import main

    sys.exit(main())
"""
    )
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return str(command)
