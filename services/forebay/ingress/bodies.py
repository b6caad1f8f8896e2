"""The bodies of the requests that workers run, by path. Each one has a `completion` from which it is prepared."""

from forebay.ingress.errors import MESSAGES_PATH
from forebay.ingress.messages.body import MessagesBody
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.requests import CHAT_PATH, TEXT_PATH, ChatBody, TextBody
from forebay.ingress.responses.body import RESPONSES_PATH, ResponsesBody

EMBEDDING_PATH = "/v1/embeddings"

AnyBody = ChatBody | TextBody | EmbeddingBody | ResponsesBody | MessagesBody
KINDS: dict[str, type[AnyBody]] = {
    CHAT_PATH: ChatBody,
    TEXT_PATH: TextBody,
    EMBEDDING_PATH: EmbeddingBody,
    RESPONSES_PATH: ResponsesBody,
    MESSAGES_PATH: MessagesBody,
}
