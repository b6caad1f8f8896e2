"""The parameters that the ingress knows include those of the installed vLLM."""

from importlib import import_module

import pytest

from forebay.ingress.http.queries import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.fields import Body
from forebay.ingress.openai.requests import ChatBody, StreamOptions, TextBody

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = pytest.mark.filterwarnings("ignore")  # as in test_vllm_engine

PAIRS = [
    (ChatBody, "openai.chat_completion.protocol", "ChatCompletionRequest"),
    (TextBody, "openai.completion.protocol", "CompletionRequest"),
    (StreamOptions, "generate.base.protocol", "StreamOptions"),
    (EmbeddingBody, "pooling.embed.protocol", "EmbeddingCompletionRequest"),
    (EmbeddingBody, "pooling.embed.protocol", "EmbeddingChatRequest"),
    (TokenizeChatBody, "serve.tokenize.protocol", "TokenizeChatRequest"),
    (TokenizeTextBody, "serve.tokenize.protocol", "TokenizeCompletionRequest"),
    (DetokenizeBody, "serve.tokenize.protocol", "DetokenizeRequest"),
]


@pytest.mark.parametrize(("ours", "module", "name"), PAIRS)
def test_every_parameter_of_vllm_is_known(ours: type[Body], module: str, name: str) -> None:
    theirs = getattr(import_module(f"vllm.entrypoints.{module}"), name)
    assert theirs.model_fields.keys() <= {*ours.model_fields, *ours.neutral, *ours.ignored}
