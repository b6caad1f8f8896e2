"""Build the tree of prompt prefixes of recent requests, with the ranks that cache them.

The requests are read from the log, newest first. Their block hashes are merged into one radix tree per adapter and
cache namespace. The state of the group tells which ranks cache a run. Anonymised recordings have no tokens, but have
block hashes, so only texts are missing there.
"""

from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from forebay.core.state.holder_bits import HolderKey
from forebay.core.state.prefix_index import NO_OVERLAP
from forebay.core.world import World
from forebay.events.base import U32_BYTES, array_u64, unpack_u32
from forebay.events.request_ids import aliases_of
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import REQUESTS
from forebay.replay.cache.facts import CacheHolder, CacheMatch, CacheNode, CacheRoot, CacheTree
from forebay.replay.cache.radix import RadixNode
from forebay.transport.base import Log, Record
from forebay.transport.history.reader import decode_or_none

REQUESTS_MAX = 2_000
NODES_MAX = 200
LEVELS_MAX = 16
LEVELS_END = 64  # more levels may exceed the nesting that a JSON decoder accepts
ROOTS_MAX = 32
MATCHES_MAX = 20
HOLDERS_MAX = 16
PREVIEW_TOKENS = 24
EXCERPT_CHARS = 40  # on each side of a match
PAGE_RECORDS = 64  # requests contain prompts, so a page may be megabytes
BYTES_MAX = 256 << 20  # of requests read, about a second; 2,000 prompts of 32,000 tokens
BLOCKS_MAX = 4 << 20  # block hashes in memory, 32 MiB

Decode = Callable[[Sequence[int]], str]  # returns the text of tokens
RootKey = tuple[str, str, int]  # adapter, cache namespace, block size


class SearchFailed(Exception):
    """The search cannot be done, or finds nothing. The text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Search:
    """What to search for among the requests of a tree.

    Attributes:
        request_id: ID of a request, on the log or as the client chose it; empty to search for `text`.
        text: text that the prompts must contain, regardless of case.
    """

    request_id: str = ""
    text: str = ""


NO_SEARCH = Search()


@dataclass(frozen=True, slots=True)
class _Prompt:
    request_id: str
    offset: int
    root: RootKey
    blocks: "array[int]"


@dataclass(slots=True)
class _Found:
    """Requests read from the log, newest first, and those of them that match the search."""

    prompts: list[_Prompt] = field(default_factory=list)
    matches: list[tuple[int, CacheMatch]] = field(default_factory=list)  # with the position in `prompts`
    matched: int = 0
    is_complete: bool = False
    has_tokens: bool = False


async def cache_tree(
    log: Log,
    partition: int,
    world: World,
    *,
    search: Search = NO_SEARCH,
    decode: Decode | None = None,
    requests_max: int = REQUESTS_MAX,
    nodes_max: int = NODES_MAX,
    levels_max: int = LEVELS_MAX,
) -> CacheTree:
    """Return the prompt prefixes of the requests that were submitted most recently before the state `world`.

    Args:
        world: state of the group. The function does not change it.
        search: marks the prompts of matching requests. Their nodes are part of the result even if they are not hot.
        decode: returns the text of tokens; None if there is no tokenizer.
        nodes_max: maximum number of nodes, except for those of matching requests.
        levels_max: maximum number of nodes on a path, except for those of matching requests; at most `LEVELS_END`.

    Raises:
        SearchFailed: the search finds nothing, or it is for text and there is no tokenizer.
        LogError: the log is damaged.
    """
    if search.text and decode is None:
        raise SearchFailed("a search for text needs the model's tokenizer; search for a request ID instead")
    found = await _read(log, partition, world, requests_max, _Matcher(search, decode))
    _require_matches(search, found)
    roots: dict[RootKey, RadixNode] = {}
    for number, prompt in enumerate(found.prompts):
        if prompt.blocks:
            root = roots.setdefault(prompt.root, RadixNode(array("Q"), 0, 0))
            root.add(prompt.blocks, number)
    marked = {
        node: None
        for at, _ in found.matches
        if found.prompts[at].blocks
        for level, node in enumerate(roots[found.prompts[at].root].path(found.prompts[at].blocks))
        if level < LEVELS_END
    }
    view = _View(world, found.prompts, marked)
    matching = {found.prompts[at].root for at, _ in found.matches}
    ordered = sorted(roots.items(), key=lambda item: (item[0] not in matching, -item[1].hits, item[0]))
    view.select(roots.values(), nodes_max, min(levels_max, LEVELS_END))
    await view.read_previews(log, partition, decode)
    return CacheTree(
        at_us=world.now_us,
        requests=len(found.prompts),
        first_offset=found.prompts[-1].offset if found.prompts else None,
        is_complete=found.is_complete,
        short=sum(not prompt.blocks for prompt in found.prompts),
        blocks=sum(root.count_blocks() for root in roots.values()),
        roots=[view.root(key, root) for key, root in ordered[:ROOTS_MAX]],
        omitted_roots=len(ordered[ROOTS_MAX:]),
        matches=[match for _, match in found.matches],
        matched=found.matched,
    )


class _Matcher:
    """Finds the requests that match a search."""

    def __init__(self, search: Search, decode: Decode | None) -> None:
        self._search = search
        self._decode = decode

    def match(self, event: RequestSubmitted, offset: int) -> CacheMatch | None:
        """Return the match of a request, or None."""
        search = self._search
        if search.request_id:
            matches = search.request_id in aliases_of(event.request_id)
            return CacheMatch(request_id=event.request_id, offset=offset, excerpt=None) if matches else None
        if not search.text or not event.token_ids:
            return None
        assert self._decode is not None, "checked before"
        text = self._decode(unpack_u32(event.token_ids))
        at = text.casefold().find(search.text.casefold())
        if at < 0:
            return None
        excerpt = text[max(0, at - EXCERPT_CHARS) : at + len(search.text) + EXCERPT_CHARS]
        return CacheMatch(request_id=event.request_id, offset=offset, excerpt=excerpt)


async def _read(log: Log, partition: int, world: World, requests_max: int, matcher: _Matcher) -> _Found:
    """Return the most recent submissions that `world` has applied. A submission that was written twice counts once."""
    found = _Found()
    seen: set[tuple[str, int]] = set()  # IDs and tie seeds: a reused ID has another seed
    sizes = sorted({pool.block_size for pool in world.pools.values()})
    read = blocks = 0
    async for record in _backwards(log, partition, world.view.get(REQUESTS.name, 0)):
        event = decode_or_none(REQUESTS, record.value)
        if not isinstance(event, RequestSubmitted) or (event.request_id, event.tie_seed) in seen:
            continue
        read += len(record.value)
        hashes = array_u64(event.sequence_hashes)
        blocks += len(hashes)
        if len(found.prompts) >= requests_max or read > BYTES_MAX or blocks > BLOCKS_MAX:
            return found
        seen.add((event.request_id, event.tie_seed))
        found.has_tokens |= bool(event.token_ids)
        match = matcher.match(event, record.offset)
        if match is not None:
            found.matched += 1
            if len(found.matches) < MATCHES_MAX:
                found.matches.append((len(found.prompts), match))
        root = event.lora_name, event.cache_namespace, _block_size(event, len(hashes), sizes)
        found.prompts.append(_Prompt(event.request_id, record.offset, root, hashes))
    found.is_complete = True
    return found


async def _backwards(log: Log, partition: int, end: int) -> AsyncIterator[Record]:
    """Yield the records of topic `requests` before an offset, newest first."""
    begin = await log.begin(REQUESTS.name, partition)
    while end > begin:
        start, page = max(begin, end - PAGE_RECORDS), deque[Record]()
        at = start
        while at < end:
            records = await log.read(REQUESTS.name, partition, at, end - at)
            if not records:
                break
            page.extend(records)
            at = records[-1].offset + 1
        while page:
            yield page.pop()
        end = start


def _block_size(event: RequestSubmitted, blocks: int, sizes: Sequence[int]) -> int:
    """Return the tokens per block for which the hashes of a request were computed."""
    fitting = [size for size in sizes if event.prompt_tokens // size == blocks]
    return fitting[0] if fitting else max(1, event.prompt_tokens // max(1, blocks))


def _require_matches(search: Search, found: _Found) -> None:
    """Raise SearchFailed if a search has no match."""
    if found.matched or search == NO_SEARCH:
        return
    among = f"the {len(found.prompts):,} most recent requests before this moment"
    if search.request_id:
        raise SearchFailed(f"request {search.request_id!r} is not among {among}; choose a moment after it")
    if found.prompts and not found.has_tokens:
        raise SearchFailed("the prompts were removed from this recording; search for a request ID instead")
    raise SearchFailed(f"no prompt of {among} contains {search.text!r}")


class _View:
    """Selects nodes of radix trees, and describes them."""

    def __init__(self, world: World, prompts: Sequence[_Prompt], marked: dict[RadixNode, None]) -> None:
        self._world = world
        self._prompts = prompts
        self._marked = marked
        self._shown = dict(marked)
        self._previews: dict[RadixNode, tuple[list[int], str | None]] = {}

    def select(self, roots: Iterable[RadixNode], nodes_max: int, levels_max: int) -> None:
        """Select the nodes with the most hits, in addition to the marked nodes. Newer nodes go first among equals."""
        counter = count()
        heap: list[tuple[int, int, int, int, RadixNode]] = []

        def push(node: RadixNode, level: int) -> None:
            heappush(heap, (-node.hits, node.newest, next(counter), level, node))

        for root in roots:
            for child in root.children.values():
                push(child, 1)
        selected = 0
        while heap and selected < nodes_max:
            *_, level, node = heappop(heap)
            self._shown[node] = None
            selected += 1
            if level < levels_max:
                for child in node.children.values():
                    push(child, level + 1)

    async def read_previews(self, log: Log, partition: int, decode: Decode | None) -> None:
        """Read the first tokens of every selected node."""
        by_offset: dict[int, list[RadixNode]] = {}
        for node in self._shown:
            by_offset.setdefault(self._prompts[node.newest].offset, []).append(node)
        for offset, nodes in sorted(by_offset.items()):
            (record,) = await log.read(REQUESTS.name, partition, offset, 1)
            event = decode_or_none(REQUESTS, record.value)
            assert isinstance(event, RequestSubmitted), "it was read before"
            size = self._prompts[nodes[0].newest].root[2]
            for node in nodes:
                first, end = node.start * size, node.end * size
                packed = event.token_ids[first * U32_BYTES : min(first + PREVIEW_TOKENS, end) * U32_BYTES]
                token_ids = unpack_u32(packed)
                self._previews[node] = token_ids, decode(token_ids) if decode is not None and token_ids else None

    def root(self, key: RootKey, root: RadixNode) -> CacheRoot:
        lora_name, cache_namespace, block_size = key
        shown, omitted = self._split(root)
        return CacheRoot(
            lora_name=lora_name,
            cache_namespace=cache_namespace,
            block_size=block_size,
            requests=root.hits,
            children=[self._node(child, block_size) for child in shown],
            omitted_children=len(omitted),
            omitted_hits=sum(child.hits for child in omitted),
        )

    def _node(self, node: RadixNode, block_size: int) -> CacheNode:
        holders = self._holders(node)
        shown, omitted = self._split(node)
        token_ids, text = self._previews[node]
        newest = self._prompts[node.newest]
        return CacheNode(
            depth=node.start,
            blocks=node.end - node.start,
            tokens=(node.end - node.start) * block_size,
            hits=node.hits,
            last_offset=newest.offset,
            last_request_id=newest.request_id,
            holders=holders[:HOLDERS_MAX],
            omitted_holders=len(holders[HOLDERS_MAX:]),
            token_ids=token_ids,
            text=text,
            is_match=node in self._marked,
            children=[self._node(child, block_size) for child in shown],
            omitted_children=len(omitted),
            omitted_hits=sum(child.hits for child in omitted),
        )

    def _split(self, node: RadixNode) -> tuple[list[RadixNode], list[RadixNode]]:
        """Return the selected children of a node and its other children, most hits first."""
        ordered = sorted(node.children.values(), key=lambda child: (-child.hits, child.newest))
        return [one for one in ordered if one in self._shown], [one for one in ordered if one not in self._shown]

    def _holders(self, node: RadixNode) -> list[CacheHolder]:
        """Return the ranks that have the first block of a run cached, most blocks first."""
        world, query = self._world, node.prompt[: node.end]
        reported = world.index.overlaps(query)
        assumed: dict[HolderKey, int] = {}
        for routed in (world.routed, world.predicted):
            for key, depth in routed.depths(query).items():
                assumed[key] = max(depth, assumed.get(key, 0))
        found = []
        for key in sorted({*reported, *assumed}):
            overlap = reported.get(key, NO_OVERLAP)
            on_host = overlap.device + overlap.host
            on_disk = on_host + overlap.disk
            ends = overlap.device, on_host, on_disk, on_disk + overlap.store
            device, host, disk, store = (max(0, end - node.start) for end in ends)
            more = max(0, assumed.get(key, 0) - node.start)
            if store or more:
                holder = CacheHolder(
                    worker_id=key[0],
                    rank=key[1],
                    device_blocks=device,
                    host_blocks=host - device,
                    disk_blocks=disk - host,
                    store_blocks=store - disk,
                    assumed_blocks=more if more > device else 0,
                )
                found.append(holder)
        return sorted(found, key=lambda one: (-max(one.device_blocks, one.assumed_blocks), one.worker_id, one.rank))
