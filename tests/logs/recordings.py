"""The recordings of this folder, and those that represent them in `make test`."""

from pathlib import Path

from tests import depth

ALL = sorted(Path(__file__).parent.glob("*.rec"))
# They contain every type of event and every topic with an undecodable record, as tests/replay/test_golden.py checks.
REPRESENTATIVE = (
    "busy-thresholds",
    "commands",
    "disaggregation",
    "disaggregation-failures",
    "encode-stage",
    "foreign-records",
    "from-snapshot",
    "lost-workers",
    "output-blocks",
    "overload",
    "own-policy",
    "resync",
    "shared-store",
    "suspect-and-draining",
    "take-over",
    "undecodable",
)


def representative() -> list[Path]:
    """Return the recordings for a costly test: `REPRESENTATIVE` under the Hypothesis profile `quick`, otherwise all."""
    return [path for path in ALL if path.stem in REPRESENTATIVE] if depth.is_quick() else ALL
