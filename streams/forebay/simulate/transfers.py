"""KV transfers from prefill workers to decode workers, in virtual time.

A worker sends the blocks of one request at a time, and receives the blocks of one request at a time, first come, first
served. The sender retains blocks until they are fetched or released, or until their lease expires. If the sender no
longer retains the blocks, the fetch fails at once. If the sender is dead, the fetch fails after a timeout. Transfer
times are computed as in Dynamo's mocker; the queues at the links are an addition.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from forebay.engine_model.model import Fetch
from forebay.events.transfer import Prefilled
from forebay.simulate.rank import EngineRank
from forebay.simulate.settings import Transfer

LEASE_US = 30_000_000  # both limits are those of live workers
FETCH_US_MAX = 10_000_000

At = Callable[[int, Callable[[], object]], object]


@dataclass(frozen=True, slots=True)
class RetainedKv:
    """KV of a prompt that a prefill worker retains for a decode worker."""

    holder: EngineRank  # rank that computed the prompt and retains its KV
    prefill_attempt: int  # attempt in which the rank computed the prompt


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of a decode worker's fetch of prefilled KV."""

    reader: EngineRank  # rank that fetched the blocks
    fetch: Fetch
    holder: EngineRank | None  # rank that retained the blocks; None if this rank is dead
    bytes: int  # bytes transferred
    took_us: int  # duration of the fetch in microseconds
    error: str = ""  # why the fetch failed; empty on success


class Transfers:
    """Simulates the KV transfers over the links of all workers. `on_over` gets the result of every fetch at its end."""

    def __init__(self, transfer: Transfer, at: At, on_over: Callable[[TransferResult], object]) -> None:
        self._transfer = transfer
        self._at = at
        self._on_over = on_over
        self._sends_us: dict[EngineRank, int] = {}  # when the outgoing link of each rank becomes free
        self._receives_us: dict[EngineRank, int] = {}

    def prefilled(self, holder: EngineRank, tokens: int) -> Prefilled:
        """Return the event part `Prefilled`, which describes the KV of `tokens` tokens on rank `holder`."""
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

    def begin(self, reader: EngineRank, fetch: Fetch, retained: RetainedKv, now_us: int) -> None:
        """Start a fetch of retained KV by rank `reader` at `now_us`."""
        holder = retained.holder
        if holder.dead:
            self._fail_later(reader, fetch, now_us, now_us)
            return
        latency_us = self._transfer.kv_transfer_latency_us
        if not holder.retains(fetch.request_id, retained.prefill_attempt):
            over = TransferResult(reader, fetch, holder, 0, latency_us, _gone(holder))
            self._at(now_us + latency_us, partial(self._on_over, over))
            return
        tokens = (fetch.blocks - fetch.first_block) * reader.spec.block_size
        free_us = max(self._sends_us.get(holder, 0), self._receives_us.get(reader, 0))
        over_us = max(now_us + latency_us, free_us) + self._transfer.lasts_us(tokens)
        self._sends_us[holder] = self._receives_us[reader] = over_us
        moved = tokens * self._transfer.kv_bytes_per_token
        over = TransferResult(reader, fetch, holder, moved, over_us - now_us)
        if over_us == now_us:
            self._on_over(over)
        else:
            self._at(over_us, partial(self._end, over, retained, now_us, over_us))

    def _end(self, over: TransferResult, retained: RetainedKv, began_us: int, now_us: int) -> None:
        holder = over.holder
        assert holder is not None, "the fetch has a source"
        if holder.dead:
            self._fail_later(over.reader, over.fetch, began_us, now_us)
        elif not holder.retains(over.fetch.request_id, retained.prefill_attempt):
            self._on_over(TransferResult(over.reader, over.fetch, holder, 0, over.took_us, _gone(holder)))
        else:
            self._on_over(over)

    def _fail_later(self, reader: EngineRank, fetch: Fetch, began_us: int, now_us: int) -> None:
        """Fail a fetch from a dead worker, after the timeout."""
        over_us = max(now_us, began_us + FETCH_US_MAX)
        error = f"the KV did not arrive within {FETCH_US_MAX // 1_000_000} s"
        self._at(over_us, partial(self._on_over, TransferResult(reader, fetch, None, 0, over_us - began_us, error)))


def _gone(holder: EngineRank) -> str:
    return f"worker {holder.spec.worker_id} no longer retains the KV"
