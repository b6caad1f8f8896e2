"""Scaling options of a workload and their effect on shared prefixes."""

import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.simulate.reading import open_workload
from forebay.simulate.workload import Turn, WorkloadOptions, WorkloadUnusable
from forebay.simulate.workloads import scaling
from forebay.simulate.workloads.statistics import workload_statistics

SIZE = 512
Rows = list[dict[str, Any]]


def tree(paths: list[list[int]], cut: list[int]) -> Rows:
    """Return prompts that are paths through a prefix tree, each with its last block shortened by `cut` tokens."""
    names: dict[tuple[int, ...], int] = {}
    rows = []
    for number, (path, less) in enumerate(zip(paths, cut, strict=True)):
        ids = [names.setdefault(tuple(path[: depth + 1]), len(names)) for depth in range(len(path))]
        length = len(ids) * SIZE - less
        rows.append({"timestamp": number, "input_length": length, "output_length": 1, "hash_ids": ids})
    return rows


def turns(path: Path, rows: Rows, **options: Any) -> list[Turn]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(open_workload(str(path), WorkloadOptions(**options)).turns())


def common(one: tuple[int, ...], two: tuple[int, ...]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def chained(found: list[Turn]) -> bool:
    parents: dict[int, int | None] = {}
    pairs = ((before, one) for turn in found for before, one in pairwise((None, *turn.block_ids)))
    return all(parents.setdefault(one, before) == before for before, one in pairs if one is not None)


PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=6)
SCALES = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0])


@given(paths=PATHS, prefix=SCALES, prompt=SCALES, partial=st.booleans())
def test_scaled_prompts_share_scaled_prefixes(
    tmp_path_factory: pytest.TempPathFactory, paths: list[list[int]], prefix: float, prompt: float, partial: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "scaling.jsonl"
    rows = tree(paths, [100 * partial] * len(paths))
    before, after = turns(path, rows), turns(path, rows, prefix_multiplier=prefix, prompt_multiplier=prompt)
    assert chained(after)
    for one in after:
        assert 1 <= one.prompt_tokens <= len(one.block_ids) * SIZE or (not one.block_ids and one.prompt_tokens == 1)
    depth = [0] * len(rows)
    for a, b in combinations(range(len(rows)), 2):
        shared = common(before[a].block_ids, before[b].block_ids)
        depth[a], depth[b] = max(depth[a], shared), max(depth[b], shared)
        # A shared partial last block counts with its own length.
        whole = min(shared, *(before[at].prompt_tokens // SIZE for at in (a, b)))
        now = common(after[a].block_ids, after[b].block_ids)
        assert min(now, *(after[at].prompt_tokens // SIZE for at in (a, b))) >= int(whole * prefix + 0.5)
        if not partial:
            assert now == int(shared * prefix + 0.5)
    for old, new, shared in zip(before, after, depth, strict=True):
        own = old.prompt_tokens - shared * SIZE
        if own > 0:
            assert new.prompt_tokens == max(1, int(shared * prefix + 0.5) * SIZE + int(own * prompt + 0.5))
        elif not own:
            assert new.prompt_tokens == max(1, int(shared * prefix + 0.5) * SIZE)


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    ids = [[0, 1, 2, 3], [0, 1], [0, 1, 2], [0, 4, 5]]
    rows = [{"timestamp": at, "output_length": 1, "hash_ids": one} for at, one in enumerate(ids)]
    rows = [{**row, "input_length": SIZE * len(ids[at]) - 12 * (at in {0, 3})} for at, row in enumerate(rows)]
    path = tmp_path / "t"
    double = turns(path, rows, prefix_multiplier=2)
    assert [turn.prompt_tokens for turn in double] == [6 * SIZE + 500, 4 * SIZE, 6 * SIZE, 2 * SIZE + 1012]
    assert [common(double[0].block_ids, double[at].block_ids) for at in (1, 2, 3)] == [4, 6, 2]
    short = turns(path, rows, prompt_multiplier=0.5)
    assert [turn.prompt_tokens for turn in short] == [3 * SIZE + 250, 2 * SIZE, 3 * SIZE, SIZE + 506]
    assert [turn.block_ids for turn in short] == [(0, 1, 2, 3), (0, 1), (0, 1, 2), (0, 4)]


@given(paths=PATHS, roots=st.integers(2, 5), seed=st.integers(0, 9))
def test_copies_of_shared_prefixes_share_nothing(
    tmp_path_factory: pytest.TempPathFactory, paths: list[list[int]], roots: int, seed: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "roots.jsonl"
    rows = tree(paths, [0] * len(paths))
    before, after = turns(path, rows), turns(path, rows, prefix_roots=roots, seed=seed)
    assert chained(after)
    assert [turn.prompt_tokens for turn in after] == [turn.prompt_tokens for turn in before]
    for a, b in combinations(range(len(rows)), 2):
        shared, now = (common(those[a].block_ids, those[b].block_ids) for those in (before, after))
        assert now in {0, shared}


def test_ideal_reuse_falls_as_copies_are_made(tmp_path: Path) -> None:
    count, shared = 400, 3
    rows = tree([[*[0] * shared, 1 + number] for number in range(count)], [0] * count)
    path = tmp_path / "t"
    for roots in (1, 4, 16):
        found = turns(path, rows, prefix_roots=roots)
        reuse = workload_statistics(found, SIZE).ideal_reuse.tokens
        assert len({turn.block_ids[0] for turn in found}) == roots, "with so many prompts each copy has some"
        assert reuse == pytest.approx((count - roots) * shared / (count * (shared + 1)))


def test_a_session_stays_in_one_copy(tmp_path: Path) -> None:
    rows: Rows = [{"format": "forebay.workload", "version": 1, "block_tokens": SIZE}]
    for number, name in enumerate(["a", "b", "", "", "", ""] * 3):
        base = {"timestamp": number, "output_length": 1, "session_id": name, "hash_ids": [0], "input_length": SIZE}
        rows += [base, {**base, "after": [2 * number], "hash_ids": [0, 1], "input_length": 2 * SIZE}]
    found = turns(tmp_path / "t", rows, prefix_roots=50)
    assert len({turn.block_ids[0] for turn in found}) > 8
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert second.after == (first.number,)
        assert first.block_ids[0] == second.block_ids[0]
    assert len({turn.block_ids[0] for turn in found if turn.session_id == "a"}) == 1


def test_prompts_without_ids_are_unique(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    workload = open_workload(str(path), WorkloadOptions(prefix_multiplier=9, prefix_roots=3, prompt_multiplier=1.5))
    [found] = workload.turns()
    assert (found.prompt_tokens, found.block_ids) == (561, ())


def test_oversized_scaling_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tree([[0] * 1_000, [0] * 1_000], [0, 0])
    with pytest.raises(WorkloadUnusable, match="scaled to 51200000 tokens"):
        turns(tmp_path / "t", rows, prefix_multiplier=100.0)
    monkeypatch.setattr(scaling, "SHARED_IDS_MAX", 999)
    with pytest.raises(WorkloadUnusable, match="more than 999 distinct block ids"):
        turns(tmp_path / "t", rows, prefix_multiplier=2.0)
