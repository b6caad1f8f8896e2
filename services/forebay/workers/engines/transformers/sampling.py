"""From logits to a token: the logits processors of transformers in vLLM's order, and a draw that can be repeated."""

from collections.abc import Sequence

import torch
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from xxhash import xxh3_64_intdigest

from forebay.events.base import U64_BYTES, U64_MASK
from forebay.events.requests import Sampling
from forebay.events.tokens import TokenLogprob, TopLogprob

GREEDY_BELOW = 1e-5  # as vLLM has it


class OutputPenalty(LogitsProcessor):  # type: ignore[misc]  # transformers has no types here
    """OpenAI's presence and frequency penalties: of tokens that were said, not of those in the prompt."""

    def __init__(self, presence: float, frequency: float, prompt_tokens: int) -> None:
        self._presence = presence
        self._frequency = frequency
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores of [1, vocabulary] after [1, tokens]."""
        counts = torch.bincount(input_ids[0, self._prompt_tokens :], minlength=scores.shape[-1])
        return scores - self._frequency * counts - self._presence * (counts > 0)


class TokenSampler:
    """The tokens of one request. With a seed, a token depends on it, its position and the logits alone.

    So an answer that another worker goes on with goes on as it would have.
    """

    def __init__(
        self, sampling: Sampling, prompt_tokens: int, stop_tokens: frozenset[int], device: torch.device
    ) -> None:
        if not sampling.temperature >= 0:
            raise ValueError(f"temperature must not be below 0, as {sampling.temperature} is")
        self._seed = sampling.seed
        self._logprobs = sampling.logprobs
        self._greedy = sampling.temperature < GREEDY_BELOW
        self._processors = _processors(sampling, prompt_tokens, stop_tokens, device)
        if not self._greedy:
            self._processors += _warpers(sampling)
        self._generator = torch.Generator(device)
        if self._seed is None:
            self._generator.seed()

    def __call__(self, tokens: Sequence[int], logits: torch.Tensor) -> tuple[int, TokenLogprob | None]:
        """The token after `tokens`, and its probability before anything was changed. Raises ValueError."""
        scores = logits[None]
        if self._processors:
            scores = self._processors(torch.tensor([list(tokens)], device=logits.device), scores)
        if not torch.isfinite(scores.max()):
            raise ValueError("the model's logits are not numbers, or no token is allowed")
        token = int(scores.argmax()) if self._greedy else self._drawn(scores[0], len(tokens))
        return token, None if self._logprobs is None else _logprob(logits, token, self._logprobs)

    def _drawn(self, scores: torch.Tensor, position: int) -> int:
        if self._seed is not None:
            mixed = xxh3_64_intdigest(position.to_bytes(U64_BYTES, "little"), self._seed & U64_MASK)
            self._generator.manual_seed(mixed)
        return int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._generator))


def _processors(
    sampling: Sampling, prompt_tokens: int, stop_tokens: frozenset[int], device: torch.device
) -> LogitsProcessorList:
    """What may change the likeliest token."""
    found = LogitsProcessorList()
    if sampling.min_tokens and stop_tokens:
        ends = sorted(stop_tokens)
        found.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, sampling.min_tokens, ends, device=device))
    if sampling.logit_bias:
        found.append(SequenceBiasLogitsProcessor({(one.token_id,): float(one.bias) for one in sampling.logit_bias}))
    if sampling.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.presence_penalty or sampling.frequency_penalty:
        found.append(OutputPenalty(sampling.presence_penalty, sampling.frequency_penalty, prompt_tokens))
    return found


def _warpers(sampling: Sampling) -> list[LogitsProcessor]:
    """What only changes a draw."""
    found: list[LogitsProcessor] = []
    if sampling.temperature != 1.0:
        found.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.min_p:
        found.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        found.append(TopPLogitsWarper(float(sampling.top_p)))
    return found


def _logprob(logits: torch.Tensor, token: int, alternatives: int) -> TokenLogprob:
    logprobs = torch.log_softmax(logits, dim=-1)
    best = torch.topk(logprobs, min(alternatives, len(logprobs)))
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(
        logprob=float(logprobs[token]), top=tuple(TopLogprob(token_id=one, logprob=value) for one, value in top)
    )
