"""A request between its arrival and its end, as its client and its workers see it."""

from dataclasses import dataclass
from itertools import repeat

from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import HASH_SEED, extend_chain
from forebay.engine_model.model import EngineRequest, EngineStage
from forebay.engine_model.sequence import seed_block
from forebay.events.base import U32_BYTES, U64_BYTES, pack_u64
from forebay.events.requests import RequestSubmitted
from forebay.simulate.outcome import Served
from forebay.simulate.rank import EngineRank
from forebay.simulate.transfers import Kept


@dataclass(slots=True, eq=False)
class UnderWay:
    """A request that has no end yet.

    Attributes:
        place: among all requests of the run; `number` is that of its turn.
        hashes: packed, of the prompt's full blocks.
        rank: whom it was sent to last.
        said: output tokens that earlier attempts said.
        kept: the KV that its answerer is to fetch.
        computing: whom its prompt was sent to last, to be computed for another; `prefill_attempt` is which attempt.
    """

    place: int
    number: int
    served: Served
    hashes: bytes
    rank: EngineRank | None = None
    said: int = 0
    kept: Kept | None = None
    computing: EngineRank | None = None
    prefill_attempt: int = 0

    @classmethod
    def of(cls, submitted: RequestSubmitted, place: int, number: int, now_us: int) -> "UnderWay":
        """One that its client sends now. Its tokens are not kept: nobody reads them, only their number counts."""
        served = Served(now_us, submitted.prompt_tokens, submitted.sampling.max_tokens, number=number)
        return cls(place, number, served, submitted.sequence_hashes)

    def attempt(self, request_id: str, attempt: int, block_size: int, stage: EngineStage) -> EngineRequest:
        """What a worker gets: a later attempt goes on behind what was said, which it has to compute, too.

        The blocks of that are named as silent engines name them.
        """
        served = self.served
        token_seed = xxh3_64_intdigest(request_id.encode())
        tokens = served.prompt_tokens + self.said
        hashes = self.hashes
        more = tokens // block_size - len(hashes) // U64_BYTES if self.said else 0
        if more:
            last = int.from_bytes(hashes[-U64_BYTES:], "little") if hashes else None
            hashes += pack_u64(extend_chain(last, repeat(seed_block(token_seed, HASH_SEED), more)))
        return EngineRequest(
            request_id=request_id,
            attempt=attempt,
            token_ids=bytes(tokens * U32_BYTES),
            sequence_hashes=hashes,
            token_seed=token_seed,
            max_tokens=served.output_tokens - self.said,
            stage=stage,
        )
