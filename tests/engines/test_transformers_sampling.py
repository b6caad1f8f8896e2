"""Tokens out of logits, on logits made by hand."""

import math
from collections import Counter
from typing import Any

import pytest

from forebay.events.requests import Sampling, TokenBias
from forebay.events.tokens import TokenLogprob

SHARES = [0.5, 0.25, 0.15, 0.07, 0.03]  # the probability of each token
DRAWS = 2_000
PROMPT = [4, 4, 3]


def logits(shares: list[float] | None = None) -> Any:
    import torch  # noqa: PLC0415 - tests are collected without it, too

    return torch.log(torch.tensor(shares or SHARES)) + 3.0


def sampler(stops: frozenset[int] = frozenset(), **sampling: Any) -> Any:
    import torch  # noqa: PLC0415 - as above

    from forebay.workers.engines.transformers.sampling import TokenSampler  # noqa: PLC0415 - imports torch

    return TokenSampler(Sampling(max_tokens=9, **sampling), len(PROMPT), stops, torch.device("cpu"))


def drawn(**sampling: Any) -> dict[int, float]:
    """The share of each token in draws of one seed at many positions."""
    one = sampler(seed=11, **sampling)
    found = Counter(one([0] * (position + 1), logits())[0] for position in range(DRAWS))
    return {token: found[token] / DRAWS for token in sorted(found)}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, SHARES),
        ({"temperature": 0.5}, [one**2 for one in SHARES]),
        ({"top_k": 2}, SHARES[:2]),
        ({"top_p": 0.8}, SHARES[:3]),
        ({"min_p": 0.2}, SHARES[:3]),
        ({"temperature": 2.0, "top_k": 3}, [math.sqrt(one) for one in SHARES[:3]]),
    ],
)
def test_draws_have_the_shares_that_were_asked_for(sampling: dict[str, Any], expected: list[float]) -> None:
    found = drawn(**sampling)
    assert set(found) <= set(range(len(expected)))
    for token, share in enumerate(expected):
        wanted = share / sum(expected)
        # Five standard deviations; the seed is fixed, so it holds or it does not.
        assert abs(found.get(token, 0.0) - wanted) < 5 * math.sqrt(wanted * (1 - wanted) / DRAWS) + 1e-9


def greedy(tokens: list[int], **sampling: Any) -> int:
    token: int = sampler(temperature=0.0, **sampling)(PROMPT + tokens, logits())[0]
    return token


def test_penalties_are_of_what_was_said_and_repetition_of_the_prompt_too() -> None:
    assert greedy([]) == 0
    assert greedy([0], presence_penalty=0.6) == 0  # log 2 is 0.69
    assert greedy([0], presence_penalty=0.8) == 1
    assert greedy([0, 0], presence_penalty=0.6) == 0
    assert greedy([0, 0], frequency_penalty=0.6) == 1
    assert greedy([0, 1], frequency_penalty=2.0) == 2
    assert greedy([], logit_bias=(TokenBias(token_id=4, bias=5.0),)) == 4
    assert greedy([], logit_bias=(TokenBias(token_id=0, bias=-100.0),)) == 1
    biased: dict[str, Any] = {"logit_bias": (TokenBias(token_id=4, bias=3.0),)}  # now the likeliest by 0.19
    assert greedy([], **biased) == 4
    assert greedy([], **biased, presence_penalty=2.0) == 4
    assert greedy([], **biased, repetition_penalty=1.5) == 0


def test_it_does_not_end_before_it_may() -> None:
    stops = frozenset([0, 1])
    ends = [sampler(stops, temperature=0.0, min_tokens=2)(PROMPT + [2] * said, logits())[0] for said in range(4)]
    assert ends == [2, 2, 0, 0]


def test_probabilities_are_told_as_the_model_has_them() -> None:
    token, told = sampler(seed=1, temperature=0.1, logprobs=2, presence_penalty=1.0)([0, 0, 0, 0], logits())
    assert isinstance(told, TokenLogprob)
    assert told.logprob == pytest.approx(math.log(SHARES[token]), abs=1e-5)
    assert [one.token_id for one in told.top] == [0, 1]
    assert [one.logprob for one in told.top] == pytest.approx([math.log(0.5), math.log(0.25)], abs=1e-5)
    assert len(sampler(logprobs=99)([0], logits())[1].top) == len(SHARES)
    assert sampler(logprobs=0)([0], logits())[1].top == ()
    assert sampler()([0], logits())[1] is None


@pytest.mark.parametrize("share", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_fail_their_request(share: float, temperature: float) -> None:
    with pytest.raises(ValueError, match="the model's logits are not numbers"):
        sampler(temperature=temperature)([0], logits([share, *SHARES[1:]]))


@pytest.mark.parametrize("sampling", [{"temperature": -1.0}, {"repetition_penalty": -1.0}, {"min_p": 2.0}])
def test_what_cannot_be_sampled_so_is_refused(sampling: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|has to be|should be"):
        sampler(**sampling)
