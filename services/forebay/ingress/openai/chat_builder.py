"""Build the chat that a conversation in the format of another API becomes."""

from collections.abc import Iterable
from typing import NamedTuple

from forebay.ingress.errors import invalid
from forebay.ingress.openai.requests import ContentPart, MediaUrl, Message, Role
from forebay.ingress.openai.tools import CalledFunction, ToolCall


class Piece(NamedTuple):
    """A text, or an image with this URL and this path in the request body."""

    text: str = ""
    url: str | None = None
    path: str = ""

    def part(self) -> ContentPart:
        if self.url is None:
            return ContentPart(type="text", text=self.text)
        return ContentPart(type="image_url", image_url=MediaUrl(url=self.url))


class ChatBuilder:
    """Builds the messages of a chat.

    Attributes:
        paths: path in the request body of each image, by its path in the chat.
        reasoning, texts, calls: parts of the assistant's next message, which `finish` adds.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.paths: dict[str, str] = {}
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []
        self._call_ids: set[str | None] = set()

    def put(self, role: Role, content: Iterable[Piece], call_id: str | None = None) -> None:
        """Add a message that is not the assistant's."""
        self.finish()
        pieces = [*content]
        where = f"messages[{len(self.messages)}].content"
        self.paths |= {f"{where}[{at}].image_url.url": piece.path for at, piece in enumerate(pieces)}
        # Some templates accept only a text.
        is_list = len(pieces) > 1 or any(piece.url is not None for piece in pieces)
        found = [piece.part() for piece in pieces] if is_list else "".join(piece.text for piece in pieces)
        self.messages.append(Message(role=role, content=found, tool_call_id=call_id))

    def call(self, call_id: str | None, name: str | None, arguments: str) -> None:
        """Add a call to the assistant's next message."""
        self._call_ids.add(call_id)
        self.calls.append(ToolCall(id=call_id or "", function=CalledFunction(name=name or "", arguments=arguments)))

    def put_result(self, path: str, call_id: str | None, content: Iterable[Piece]) -> None:
        """Add the result of a call. Raises ApiError (400), which names `path`, if there is no such call."""
        if call_id not in self._call_ids:
            raise invalid(f"{path}: no earlier call has the id {call_id!r}; send the call, too", path)
        self.put("tool", content, call_id)

    def finish(self) -> None:
        """Add the assistant's message, if it has any part."""
        if self.reasoning or self.texts or self.calls:
            content = None if self.calls and not self.texts else "".join(self.texts)
            reasoning, calls = "".join(self.reasoning) or None, self.calls or None
            message = Message(role="assistant", content=content, tool_calls=calls, reasoning_content=reasoning)
            self.messages.append(message)
            self.reasoning, self.texts, self.calls = [], [], []
