"""The tree of prompt prefixes: runs, hits, holders, hottest nodes, previews and searches."""

import asyncio
import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing

import msgspec
import pytest

from forebay.events.base import pack_u32, unpack_u64
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import REQUESTS
from forebay.replay.at import seek
from forebay.replay.cache import tree as module
from forebay.replay.cache.facts import CacheNode, CacheRoot, CacheTree
from forebay.replay.cache.radix import RadixNode
from forebay.replay.cache.tree import NO_SEARCH, Decode, Search, SearchFailed, cache_tree
from forebay.transport.history.reader import decode_or_none
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import BLOCK, PROMPTS, request
from tests.logs.own_policy import CUSTOM
from tests.logs.record import FOLDER
from tests.replay.recorder import Recorder, fleet, stored

RECORDINGS = sorted(path.stem for path in FOLDER.glob("*.rec"))
A, B = PROMPTS[0], PROMPTS[1]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def tree_of(
    made: Recorder,
    search: Search = NO_SEARCH,
    decode: Decode | None = None,
    requests_max: int = 100,
    nodes_max: int = 100,
    levels_max: int = 9,
) -> CacheTree:
    async def build() -> CacheTree:
        log = await made.log()
        with closing(log):
            limits = {"requests_max": requests_max, "nodes_max": nodes_max, "levels_max": levels_max}
            return await cache_tree(log, 0, made.world, search=search, decode=decode, **limits)

    found = asyncio.run(build())
    assert msgspec.json.decode(msgspec.json.encode(found), type=CacheTree) == found
    return found


def submit(made: Recorder, name: str, blocks: list[int], text: str = "") -> None:
    tokens = {"token_ids": pack_u32(map(ord, text))} if text else {}
    made("requests", request(name, blocks, **tokens))


def nodes_of(parent: CacheRoot | CacheNode) -> Iterator[CacheNode]:
    for child in parent.children:
        yield child
        yield from nodes_of(child)


def outline(parent: CacheRoot | CacheNode) -> list[tuple[int, int, int]]:
    """Return depth, blocks and hits of all nodes."""
    return [(node.depth, node.blocks, node.hits) for node in nodes_of(parent)]


def test_prompts_share_the_runs_of_their_common_prefixes() -> None:
    made = fleet()
    submit(made, "r1", A[:6])
    submit(made, "r2", [*A[:4], 91, 92])
    submit(made, "r3", A[:4])
    submit(made, "r4", B)
    submit(made, "short", [])
    tree = tree_of(made)
    (root,) = tree.roots
    assert outline(root) == [(0, 4, 3), (4, 2, 1), (4, 2, 1), (0, 8, 1)]
    assert (tree.requests, tree.short, tree.blocks, tree.first_offset, tree.is_complete) == (
        5,
        1,
        4 + 2 + 2 + 8,
        0,
        True,
    )
    assert (root.requests, root.block_size, root.lora_name, root.cache_namespace) == (4, BLOCK, "", "")
    first = root.children[0]
    assert (first.tokens, first.last_request_id, first.last_offset) == (4 * BLOCK, "r3", 2)
    assert [child.last_request_id for child in first.children] == ["r2", "r1"], "newer first among equals"


def test_holders_have_the_leading_blocks_of_a_run() -> None:
    made = fleet()
    stored(made, "a", A[:3])
    stored(made, "b", A[:6])
    stored(made, "c", A[4:6])
    stored(made, "a", A[3:5], seq=2, tier="host")
    submit(made, "r1", A[:6])
    submit(made, "r2", [*A[:4], 91])
    tree = tree_of(made)
    shared, *rest = nodes_of(tree.roots[0])
    assert [(one.worker_id, one.device_blocks, one.host_blocks) for one in shared.holders] == [("b", 4, 0), ("a", 3, 1)]
    (own,) = [node for node in rest if node.blocks == 2]
    assert [(one.worker_id, one.device_blocks, one.host_blocks) for one in own.holders] == [("b", 2, 0), ("a", 0, 1)]
    assert [node.holders for node in rest if node.blocks == 1] == [[]]


def test_blocks_that_the_router_assumes_are_holders_too() -> None:
    made = fleet("a", use_kv_events=False)
    submit(made, "r1", A)
    (node,) = nodes_of(tree_of(made).roots[0])
    (holder,) = node.holders
    assert (holder.worker_id, holder.device_blocks, holder.assumed_blocks) == ("a", 0, 8)


def test_the_hottest_nodes_are_shown_and_the_others_counted() -> None:
    made = fleet()
    for number in range(5):
        submit(made, f"hot-{number}", [*A, 100 + number])
    for number in range(3):
        submit(made, f"warm-{number}", B)
    submit(made, "cold", PROMPTS[2])
    (root,) = tree_of(made, nodes_max=2).roots
    assert outline(root) == [(0, 8, 5), (0, 8, 3)]
    assert (root.omitted_children, root.omitted_hits) == (1, 1)
    assert (root.children[0].omitted_children, root.children[0].omitted_hits) == (5, 5)
    (root,) = tree_of(made, nodes_max=4).roots
    assert [child.last_request_id for child in root.children[0].children] == ["hot-4"], "the newest among equals"
    flat = tree_of(made, levels_max=1).roots[0]
    assert outline(flat) == [(0, 8, 5), (0, 8, 3), (0, 8, 1)]
    assert flat.children[0].omitted_children == 5


def test_a_matching_request_is_shown_even_if_it_is_cold() -> None:
    made = fleet()
    for number in range(5):
        submit(made, f"hot-{number}", A)
    submit(made, "cold~0000000000ab", [*B[:4], 91])
    submit(made, "warm", B[:4])
    submit(made, "warm-2", B[:4])
    tree = tree_of(made, Search(request_id="cold"), nodes_max=1, levels_max=1)
    assert [(match.request_id, match.offset, match.excerpt) for match in tree.matches] == [
        ("cold~0000000000ab", 5, None)
    ]
    assert [(node.depth, node.is_match) for node in nodes_of(tree.roots[0])] == [(0, False), (0, True), (4, True)]
    with pytest.raises(SearchFailed, match="request 'none' is not among the 8 most recent requests before this moment"):
        tree_of(made, Search(request_id="none"))


def test_text_is_searched_with_a_tokenizer() -> None:
    made = fleet()
    submit(made, "r1", A[:2], "Why the sky")
    submit(made, "r2", A[:3], "Why the SKY red")
    submit(made, "r3", B[:1], "Hello")
    tree = tree_of(made, Search(text="the sky"), decode)
    assert [(match.request_id, match.excerpt) for match in tree.matches] == [
        ("r2", "Why the SKY red"),
        ("r1", "Why the sky"),
    ]
    assert tree.matched == 2
    shown = {node.text: node.is_match for node in nodes_of(tree.roots[0])}
    assert shown == {"Why the ": True, "SKY ": True, "Hell": False}
    with pytest.raises(
        SearchFailed, match="no prompt of the 3 most recent requests before this moment contains 'moon'"
    ):
        tree_of(made, Search(text="moon"), decode)
    with pytest.raises(SearchFailed, match="needs the model's tokenizer; search for a request ID"):
        tree_of(made, Search(text="sky"))
    without = next(nodes_of(tree_of(made).roots[0]))
    assert (without.text, without.token_ids) == (None, [ord(char) for char in "Why the "])


def test_a_preview_and_an_excerpt_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fleet()
    submit(made, "r", A, "x" * 14 + "needle" + "y" * 14)
    monkeypatch.setattr(module, "PREVIEW_TOKENS", 5)
    monkeypatch.setattr(module, "EXCERPT_CHARS", 3)
    tree = tree_of(made, Search(text="Needle"), decode)
    assert (tree.matches[0].excerpt, tree.roots[0].children[0].text) == ("xxxneedleyyy", "xxxxx")


def test_only_the_newest_requests_before_the_moment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_RECORDS", 2)
    made = fleet()
    for number in range(5):
        submit(made, f"r{number}", A[: number + 1])
    submit(made, "r4", A[:5])  # written twice
    tree = tree_of(made, requests_max=3)
    assert (tree.requests, tree.first_offset, tree.is_complete) == (3, 2, False)
    assert outline(tree.roots[0]) == [(0, 3, 3), (3, 1, 2), (4, 1, 1)]
    assert tree_of(made, requests_max=5).is_complete
    monkeypatch.setattr(module, "BLOCKS_MAX", 9)
    assert tree_of(made).requests == 2, "5 + 4 blocks"
    made.world.view["requests"] = 2
    assert (tree_of(made).requests, tree_of(made).first_offset) == (2, 0)


def test_adapters_and_cache_namespaces_have_roots_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fleet()
    made("requests", request("r1", A, cache_namespace="x"))
    made("requests", request("r2", B, cache_namespace="x"))
    made("requests", request("r3", PROMPTS[2]))
    made("requests", request("r4", [1], lora_name="l"))
    found = [(root.lora_name, root.cache_namespace, root.requests) for root in tree_of(made).roots]
    assert found == [("", "x", 2), ("", "", 1), ("l", "", 1)]
    monkeypatch.setattr(module, "ROOTS_MAX", 1)
    tree = tree_of(made, Search(request_id="r4"))
    assert ([root.lora_name for root in tree.roots], tree.omitted_roots) == (["l"], 2)


@pytest.mark.parametrize("name", RECORDINGS)
def test_recordings_have_the_hits_and_holders_of_their_prompts(name: str) -> None:
    """Compare every node with a count over all prompts, and its holders with the index that routing uses."""

    async def both(log: SqliteLog) -> None:
        world = (await seek(log, 0, None, CUSTOM)).world
        tree = await cache_tree(log, 0, world, nodes_max=10_000, levels_max=64)
        records = log.records(REQUESTS.name, 0, await log.begin(REQUESTS.name, 0), 10_000)
        events = {one.offset: decode_or_none(REQUESTS, one.value) for one in records}
        submitted = {
            (event.request_id, event.tie_seed): (offset, unpack_u64(event.sequence_hashes))
            for offset, event in events.items()
            if isinstance(event, RequestSubmitted) and offset < world.view[REQUESTS.name]
        }
        prompts = dict(submitted.values())
        assert tree.requests == len(prompts)
        assert tree.blocks == len({block for prompt in prompts.values() for block in prompt})
        for root in tree.roots:
            assert root.omitted_children == 0
            for node in nodes_of(root):
                run = prompts[node.last_offset][: node.depth + node.blocks]
                assert node.hits == sum(prompt[: len(run)] == run for prompt in prompts.values())
                assert node.token_ids == [], "the recordings are anonymised"
                reported = world.index.overlaps(array("Q", run))
                expected = {key: sum(one) for key, one in reported.items() if sum(one) > node.depth}
                shown = {
                    (one.worker_id, one.rank): node.depth + blocks
                    for one in node.holders
                    if (blocks := one.device_blocks + one.host_blocks + one.disk_blocks + one.store_blocks)
                }
                assert shown == expected

    with closing(SqliteLog.open(FOLDER / f"{name}.rec", readonly=True)) as log:
        asyncio.run(both(log))


def test_a_search_for_text_in_an_anonymised_recording_is_an_error() -> None:
    async def search(log: SqliteLog) -> None:
        await cache_tree(log, 0, (await seek(log, 0)).world, search=Search(text="x"), decode=decode)

    text = "the prompts were removed from this recording"
    with closing(SqliteLog.open(FOLDER / "kv.rec", readonly=True)) as log, pytest.raises(SearchFailed, match=text):
        asyncio.run(search(log))


def test_radix_trees_of_random_prompts_have_the_right_paths() -> None:
    rng = random.Random(7)
    chains: list[list[int]] = [[]]
    fresh = iter(range(1, 100_000))
    for _ in range(300):
        base = rng.choice(chains)
        chains.append([*base[: rng.randint(0, len(base))], *(next(fresh) for _ in range(rng.randint(0, 5)))])
    prompts = [array("Q", chain) for chain in chains if chain]
    root = RadixNode(array("Q"), 0, 0)
    for number, prompt in enumerate(prompts):
        root.add(prompt, number)
    assert root.count_blocks() == len({block for prompt in prompts for block in prompt})
    for prompt in prompts:
        runs = list(root.path(prompt))
        assert array("Q", [block for node in runs for block in node.prompt[node.start : node.end]]) == prompt
        for node in runs:
            sharing = [at for at, other in enumerate(prompts) if other[: node.end] == prompt[: node.end]]
            assert (node.hits, node.newest) == (len(sharing), sharing[0])
