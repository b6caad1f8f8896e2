"""KV on its way from prefill workers to decode workers, in virtual time.

A worker sends the blocks of one request at a time, and receives those of one; who asks first is first. Blocks are kept
until they were fetched, given up, or their lease is over; whoever asks for what is not kept is told so, and who asks a
worker that is dead, or dies meanwhile, gives up after a while. Source of the times: Dynamo's mocker, without queues.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from forebay.engine_model.model import Fetch
from forebay.events.transfer import Prefilled
from forebay.simulate.rank import EngineRank
from forebay.simulate.settings import Transfer

LEASE_US = 30_000_000  # as live workers keep blocks, and give up fetching them
FETCH_US_MAX = 10_000_000

At = Callable[[int, Callable[[], object]], object]


@dataclass(frozen=True, slots=True)
class Kept:
    """The KV of a prompt at the worker that computed it, at an attempt to do so."""

    holder: EngineRank
    prefill_attempt: int


@dataclass(frozen=True, slots=True)
class Transferred:
    """A fetch that is over. `error` is why there is nothing; empty if there is."""

    reader: EngineRank
    fetch: Fetch
    holder: EngineRank | None
    bytes: int
    took_us: int
    error: str = ""


class Transfers:
    """The links of all workers. `at` lets something happen at a time, `on_over` is told of every fetch that is over."""

    def __init__(self, transfer: Transfer, at: At, on_over: Callable[[Transferred], object]) -> None:
        self._transfer = transfer
        self._at = at
        self._on_over = on_over
        self._sends_us: dict[EngineRank, int] = {}  # until when each is busy
        self._receives_us: dict[EngineRank, int] = {}

    def prefilled(self, holder: EngineRank, tokens: int) -> Prefilled:
        """What a worker says of a prompt that it computed."""
        spec = holder.spec
        blocks = -(-tokens // spec.block_size)
        return Prefilled(
            worker_id=spec.worker_id,
            worker_epoch=holder.worker_epoch,
            model=spec.model,
            connector="simulated",
            descriptor=b"",
            tokens=tokens,
            lease_us=LEASE_US,
            bytes=blocks * spec.block_size * self._transfer.kv_bytes_per_token,
        )

    def begin(self, reader: EngineRank, fetch: Fetch, kept: Kept, now_us: int) -> None:
        """A worker asks for blocks."""
        holder = kept.holder
        if holder.dead:
            self._fail_later(reader, fetch, now_us, now_us)
            return
        latency_us = self._transfer.kv_transfer_latency_us
        if not holder.keeps(fetch.request_id, kept.prefill_attempt):
            over = Transferred(reader, fetch, holder, 0, latency_us, _gone(holder))
            self._at(now_us + latency_us, partial(self._on_over, over))
            return
        tokens = (fetch.blocks - fetch.first_block) * reader.spec.block_size
        free_us = max(self._sends_us.get(holder, 0), self._receives_us.get(reader, 0))
        over_us = max(now_us + latency_us, free_us) + self._transfer.lasts_us(tokens)
        self._sends_us[holder] = self._receives_us[reader] = over_us
        moved = tokens * self._transfer.kv_bytes_per_token
        over = Transferred(reader, fetch, holder, moved, over_us - now_us)
        if over_us == now_us:
            self._on_over(over)
        else:
            self._at(over_us, partial(self._end, over, kept, now_us, over_us))

    def _end(self, over: Transferred, kept: Kept, began_us: int, now_us: int) -> None:
        holder = over.holder
        assert holder is not None, "somebody sent it"
        if holder.dead:
            self._fail_later(over.reader, over.fetch, began_us, now_us)
        elif not holder.keeps(over.fetch.request_id, kept.prefill_attempt):
            self._on_over(Transferred(over.reader, over.fetch, holder, 0, over.took_us, _gone(holder)))
        else:
            self._on_over(over)

    def _fail_later(self, reader: EngineRank, fetch: Fetch, began_us: int, now_us: int) -> None:
        """Nobody answers."""
        over_us = max(now_us, began_us + FETCH_US_MAX)
        error = f"the KV did not come within {FETCH_US_MAX // 1_000_000} s"
        self._at(over_us, partial(self._on_over, Transferred(reader, fetch, None, 0, over_us - began_us, error)))


def _gone(holder: EngineRank) -> str:
    return f"{holder.spec.worker_id} keeps the KV no longer"
