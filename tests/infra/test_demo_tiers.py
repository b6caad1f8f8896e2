"""The verdict of `make demo-tiers`, and the damage that it does to stored blocks."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness.demo_tiers import Result
from tests.harness.s3 import faulty_s3
from tests.harness.tier_faults import BlockDamage
from tests.harness.tier_system import Reuse


def good() -> dict[str, Any]:
    return {
        "exact": 9,
        "reuse": Reuse(Counter(host=160, disk=32, store=16)),
        "restarted": Reuse(Counter(disk=16)),
        "newcomers": {"directory": Reuse(own=16), "bucket": Reuse(own=16)},
        "damaged": {"flipped file": 3},
        "stale": 2,
        "verified": 9,
        "decisions": 9,
    }


def test_the_last_line_summarizes_the_result() -> None:
    result = Result(**good())
    result.judge()
    assert result.line() == (
        "9 answers exact, 0 wrong; 3 blocks damaged, 2 stale entries of stores found; verified 9 of 9: ok"
    )
    assert result.reuse.line() == "160 from host, 32 from disk, 16 from store"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"exact": 0}, "no answer arrived"),
        ({"wrong": ["r1: 'a', expected 'b'"]}, "r1: 'a', expected 'b'"),
        ({"reuse": Reuse(Counter(host=1))}, "no KV was loaded from disk under load"),
        ({"restarted": Reuse(Counter(host=1, store=1))}, "the restarted worker loaded no KV from its disk"),
        ({"newcomers": {"directory": Reuse(own=16)}}, "the new worker loaded no KV from the bucket"),
        ({"damaged": {}}, "nothing was damaged"),
        ({"verified": 8}, "9 decisions were recorded and 8 of them derived equal"),
    ],
)
def test_each_unmet_requirement_is_reported(change: dict[str, Any], problem: str) -> None:
    result = Result(**{**good(), **change})
    result.judge()
    assert result.problems == [problem]
    assert result.line().endswith(f": FAILED ({problem})")


def test_files_and_objects_are_damaged(tmp_path: Path) -> None:
    content = bytes(range(100))
    with faulty_s3("kv-blocks") as bucket:
        client = bucket.client
        for number in range(12):
            (tmp_path / f"{number}.kv").write_bytes(content)
            client.put_object(Bucket=bucket.bucket, Key=f"kv/{number}.kv", Body=content)
        (tmp_path / "store.json").write_text("{}")
        damage = BlockDamage(1, [tmp_path], bucket)
        for _ in range(12):
            damage.damage()
        assert {kind.split()[0] for kind in damage.done} == {"truncated", "flipped", "deleted"}
        files = [*tmp_path.glob("*.kv")]
        assert len(files) == 12 - damage.done["deleted file"]
        assert any(file.read_bytes() != content for file in files)
        assert (tmp_path / "store.json").read_text() == "{}"
        assert len(bucket.keys()) == 12 - damage.done["deleted object"]
        before = sum(damage.done.values())
        bucket.stop()
        damage.damage()
        bucket.start()
        bucket.deny()
        damage.damage()
        assert sum(damage.done.values()) == before + 2, "the bucket does not serve, the directory does"
        bucket.start()
        assert len(bucket.keys()) == 12 - damage.done["deleted object"], "objects survive a stop"
