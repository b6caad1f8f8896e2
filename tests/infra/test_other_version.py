"""The other version of `make demo-upgrade`, which a patch of this tree makes."""

import subprocess
import sys
from pathlib import Path

import pytest

from forebay.core.world import CORE_VERSION
from forebay.events.versions import EVENTS_VERSION
from tests.harness import other_version
from tests.harness.other_version import BATCH_MEASURED, COST_NOTED, OTHER_VERSION, PatchOutdated, Replacement, build

PROGRAM = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="other")
import forebay.events.topics, forebay.core.rederive, forebay.core.world
from forebay.core.world import CORE_VERSION
from forebay.events.codec import _tags
from forebay.events.topics import DECISIONS
from forebay.events.versions import EVENTS_VERSION
print(EVENTS_VERSION, CORE_VERSION, sys.argv[2] in _tags(DECISIONS.events))
print("".join(sorted({module.__file__ for name, module in sys.modules.items()
    if name.startswith("forebay.") and not module.__file__.startswith(sys.argv[3])})))
"""


def test_the_patch_applies_and_the_copy_imports_only_itself(tmp_path: Path) -> None:
    command = build(tmp_path / "other")
    arguments = [command, COST_NOTED, str(tmp_path / "other")]
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == (f"{EVENTS_VERSION + 1} {OTHER_VERSION} True\n\n", "")
    assert OTHER_VERSION == CORE_VERSION + 1


WRITER = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="other")
from forebay.engine_model.model import EngineLoad, Finished
from forebay.events.fleet import WorkerSpec
from forebay.workers.engine import EngineBatch
from forebay.workers.runtime.outbox import Outbox
from forebay.workers.runtime.request_table import RequestTable

spec = WorkerSpec(worker_id="w", model="m", block_size=4, kv_blocks_total=9, max_num_seqs=9, max_num_batched_tokens=9)
outbox = Outbox(spec, 0, "m", 0)
batch = EngineBatch(rank=0, load=EngineLoad(0, 0, 0, 9), finished=[Finished("r", 1, "stop", 1, 1, 0)])
for version in sys.argv[3:]:
    outbox.owner_events = int(version)
    print(sum(sys.argv[2].encode() in draft.value for draft in outbox.batch(batch, RequestTable())))
"""


def test_a_worker_writes_a_new_event_only_while_the_owner_can_read_it(tmp_path: Path) -> None:
    command = build(tmp_path / "other")
    versions = [str(EVENTS_VERSION + more) for more in (0, 1, 2, 0)]
    arguments = [command, BATCH_MEASURED, *versions]
    ran = subprocess.run([sys.executable, "-c", WRITER, *arguments], capture_output=True, text=True, check=False)
    assert (ran.stdout.split(), ran.stderr) == (["0", "1", "1", "0"], "")


@pytest.mark.parametrize(("before", "times"), [("no such text", 0), ("import", 2)])
def test_a_patch_that_does_not_fit_the_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, times: int
) -> None:
    for name in other_version.SOURCES:
        (tmp_path / "tree" / name).mkdir(parents=True)
    (tmp_path / "tree/schemas/a.py").write_text("import a\nimport b\n")
    monkeypatch.setattr(other_version, "ROOT", tmp_path / "tree")
    monkeypatch.setattr(other_version, "PATCH", [Replacement("schemas/a.py", before, "x")])
    with pytest.raises(PatchOutdated, match=f"schemas/a.py has the text to replace {times} times, expected once"):
        build(tmp_path / "other")
