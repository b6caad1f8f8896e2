"""The parameters that the ingress knows include those of the installed vLLM."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here")

from vllm.entrypoints.generate.base.protocol import StreamOptions as VllmStreamOptions
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingChatRequest, EmbeddingCompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest

from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.fields import Body
from forebay.ingress.openai.requests import ChatBody, StreamOptions, TextBody
from forebay.ingress.openai.tokenization import DetokenizeBody, TokenizeChatBody, TokenizeTextBody


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ChatBody, ChatCompletionRequest),
        (TextBody, CompletionRequest),
        (StreamOptions, VllmStreamOptions),
        (EmbeddingBody, EmbeddingCompletionRequest),
        (EmbeddingBody, EmbeddingChatRequest),
        (TokenizeChatBody, TokenizeChatRequest),
        (TokenizeTextBody, TokenizeCompletionRequest),
        (DetokenizeBody, DetokenizeRequest),
    ],
)
def test_every_parameter_of_vllm_is_known(ours: type[Body], theirs: Any) -> None:
    assert theirs.model_fields.keys() <= {*ours.model_fields, *ours.neutral, *ours.ignored}
