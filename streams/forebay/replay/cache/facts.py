"""Plain data of the cache tree."""

from forebay.replay.moment import Fact


class CacheHolder(Fact, frozen=True, kw_only=True):
    """A worker rank that has at least the first block of a run cached, and all blocks of the prompt before the run.

    Attributes:
        device_blocks: leading blocks of the run in device memory, according to KV events.
        host_blocks: further leading blocks of the run in host memory, according to KV events.
        disk_blocks: further leading blocks of the run on disk, according to KV events.
        store_blocks: further leading blocks of the run in the shared store of the worker.
        assumed_blocks: leading blocks of the run that the router assumes in device memory, because it routed a prompt
            with them to the rank; 0 if this number is not larger than `device_blocks`.
    """

    worker_id: str
    rank: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    store_blocks: int = 0
    assumed_blocks: int = 0


class CacheNode(Fact, frozen=True, kw_only=True):
    """A run of blocks that the same requests share. Runs along a path from a root make up a prompt.

    Attributes:
        depth: number of blocks before the run, from the beginning of the prompt.
        tokens: number of tokens of the run.
        hits: number of requests whose prompt contains the run.
        last_offset: offset of the newest of these requests on topic `requests`.
        holders: ranks that have the first block of the run cached, most blocks first.
        omitted_holders: number of further ranks that have the first block of the run cached.
        token_ids: first tokens of the run; empty if the recording is anonymised.
        text: these tokens decoded; null without a tokenizer or tokens.
        is_match: whether the run belongs to the prompt of a request that matches the search.
        children: continuations of the run, most hits first.
        omitted_children: number of further continuations, which are not in `children`.
        omitted_hits: number of requests of these further continuations.
    """

    depth: int
    blocks: int
    tokens: int
    hits: int
    last_offset: int
    last_request_id: str
    holders: list[CacheHolder]
    omitted_holders: int
    token_ids: list[int]
    text: str | None
    is_match: bool
    children: list["CacheNode"]
    omitted_children: int
    omitted_hits: int


class CacheRoot(Fact, frozen=True, kw_only=True):
    """The prompts of one cache. Requests of different adapters or cache namespaces share no blocks.

    Attributes:
        lora_name: LoRA adapter of the requests; empty for the base model.
        cache_namespace: cache namespace of the requests; empty for the default.
        block_size: tokens per block.
        requests: number of requests with at least one full block.
        children: first runs of their prompts, most hits first.
        omitted_children: number of further first runs, which are not in `children`.
        omitted_hits: number of requests of these further first runs.
    """

    lora_name: str
    cache_namespace: str
    block_size: int
    requests: int
    children: list[CacheNode]
    omitted_children: int
    omitted_hits: int


class CacheMatch(Fact, frozen=True, kw_only=True):
    """A request that matches the search.

    Attributes:
        offset: offset of its submission on topic `requests`.
        excerpt: text around the match; null for a search by ID.
    """

    request_id: str
    offset: int
    excerpt: str | None


class CacheTree(Fact, frozen=True, kw_only=True):
    """Prompt prefixes of recent requests at one moment, with the ranks that cache them.

    Attributes:
        at_us: the owner's clock, in microseconds since 1970.
        first_offset: offset of the oldest of these requests on topic `requests`; null without a request.
        is_complete: whether these are all requests on the log before the moment.
        short: number of these requests without a full block. They are in no root.
        roots: one root per adapter and cache namespace: first those of matching requests, then most requests first.
        omitted_roots: number of further roots, which are not in `roots`.
        matches: newest requests that match the search; empty without a search.
    """

    at_us: int
    requests: int
    first_offset: int | None
    is_complete: bool
    short: int
    blocks: int
    roots: list[CacheRoot]
    omitted_roots: int
    matches: list[CacheMatch]
    matched: int
