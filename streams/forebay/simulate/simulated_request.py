"""State of a request between its arrival and its end, as its client and its workers see it."""

from dataclasses import dataclass
from itertools import repeat

from msgspec import structs
from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import HASH_SEED, extend_chain
from forebay.engine_model.model import Computed, EngineRequest, EngineStage, FirstTokenStep
from forebay.engine_model.sequence import seed_block
from forebay.events.base import U32_BYTES, U64_BYTES, pack_u64
from forebay.events.decisions import RequestRouted
from forebay.events.progress import OnboardedTokens
from forebay.events.requests import RequestSubmitted
from forebay.simulate.outcome import RequestOutcome
from forebay.simulate.rank import EngineRank
from forebay.simulate.timeline import Recorder
from forebay.simulate.transfers import RetainedKv


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """Request that has not ended yet."""

    place: int  # index of the request among all requests of the run, in the order of arrival
    number: int  # number of the request in the workload (`Turn.number`)
    served: RequestOutcome  # outcome of the request so far
    hashes: bytes  # packed hashes of the full blocks of the prompt
    rank: EngineRank | None = None
    emitted: int = 0  # output tokens emitted by earlier attempts
    # KV that a prefill worker retains until the decode worker fetches it; None without remote prefill.
    retained: RetainedKv | None = None
    computing: EngineRank | None = None  # prefill rank to which the prompt was sent last
    prefill_attempt: int = 0

    @classmethod
    def of(cls, submitted: RequestSubmitted, place: int, number: int, now_us: int) -> "SimulatedRequest":
        """Create the state of a request that arrives at `now_us`, with the number of its tokens but not the tokens."""
        served = RequestOutcome(now_us, submitted.prompt_tokens, submitted.sampling.max_tokens, number=number)
        return cls(place, number, served, submitted.sequence_hashes)

    def assign(self, rank: EngineRank, routed: RequestRouted) -> None:
        self.rank = rank
        self.served.attempts = max(self.served.attempts, routed.attempt)
        self.retained = None
        if routed.stage == "prefill":
            self.computing, self.prefill_attempt = rank, routed.attempt
            return
        self.served.worker = rank.number
        if routed.stage == "aggregated":
            self.served.prefiller = None
            return
        assert self.computing is not None, "a decode stage follows a prefill"
        self.retained = RetainedKv(self.computing, self.prefill_attempt)

    def first_token(self, rank: EngineRank, first: FirstTokenStep, at_us: int, recorder: Recorder) -> FirstTokenStep:
        """Record the first token of an attempt, which the client gets at `at_us`.

        Return `first` with the statistics of the transfer, if the KV of the prompt was fetched.
        """
        served = self.served
        if not self.emitted:
            served.first_us = at_us
        if self.retained is None:
            self._computed(rank, first, first.onboarded, recorder)
            return first
        return structs.replace(first, transferred_bytes=served.transferred_bytes, transfer_us=served.transfer_us)

    def prefilled(
        self, rank: EngineRank, one: Computed, onboarded: tuple[OnboardedTokens, ...], now_us: int, recorder: Recorder
    ) -> None:
        """Record that a prefill worker has computed the prompt."""
        self.served.prefiller, self.served.prefilled_us = rank.number, now_us
        self._computed(rank, one, onboarded, recorder)

    def _computed(
        self,
        rank: EngineRank,
        one: FirstTokenStep | Computed,
        onboarded: tuple[OnboardedTokens, ...],
        recorder: Recorder,
    ) -> None:
        served = self.served
        served.record_prompt(one.cached_tokens, onboarded)
        recorder.count_prompt(rank.number, served.prompt_tokens, served.cached_tokens)

    def attempt(self, request_id: str, attempt: int, block_size: int, stage: EngineStage) -> EngineRequest:
        """Return this attempt as a request to the engine model.

        A later attempt continues after the output tokens of earlier attempts, so its prompt includes these tokens.
        Their blocks have the same hashes as blocks of an engine that emits no token ids.
        """
        served = self.served
        token_seed = xxh3_64_intdigest(request_id.encode())
        tokens = served.prompt_tokens + self.emitted
        hashes = self.hashes
        more = tokens // block_size - len(hashes) // U64_BYTES if self.emitted else 0
        if more:
            last = int.from_bytes(hashes[-U64_BYTES:], "little") if hashes else None
            hashes += pack_u64(extend_chain(last, repeat(seed_block(token_seed, HASH_SEED), more)))
        return EngineRequest(
            request_id=request_id,
            attempt=attempt,
            token_ids=bytes(tokens * U32_BYTES),
            sequence_hashes=hashes,
            token_seed=token_seed,
            max_tokens=served.output_tokens - self.emitted,
            stage=stage,
        )
