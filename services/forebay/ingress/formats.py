"""Registry of the formats of responses, by API."""

from collections.abc import Mapping

from forebay.events.rendering import Api, Rendering
from forebay.ingress.formatter import Formatter
from forebay.ingress.messages.formatter import MessagesFormatter
from forebay.ingress.render import CompletionFormatter
from forebay.ingress.responses.formatter import ResponsesFormatter

FORMATTERS: Mapping[Api, type[Formatter]] = {
    "chat_completions": CompletionFormatter,
    "completions": CompletionFormatter,
    "responses": ResponsesFormatter,
    "messages": MessagesFormatter,
}


def formatter_of(rendering: Rendering, response_id: str) -> Formatter:
    """Return a new formatter of a response, whose id for the client is `response_id`."""
    return FORMATTERS[rendering.api](rendering, response_id)
