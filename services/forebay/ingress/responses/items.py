"""Items of a conversation of the Responses API, and the messages of a chat that they become.

Consecutive items of the assistant (reasoning, a message, calls of functions) become one message.
Source: OpenAI API reference, responses.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from forebay.ingress.body_limits import MESSAGES_MAX
from forebay.ingress.errors import invalid
from forebay.ingress.openai.fields import Body, Neutral, reject_extra
from forebay.ingress.openai.requests import ContentPart, MediaUrl, Message, Role
from forebay.ingress.openai.tools import CalledFunction, CallId, ToolCall

ID_CHARS_MAX = 512  # of an item: its kind, its position, and the id of its response
IMAGE = "input_image"
# Field with the value of a part, by the type of the part.
VALUE_OF = {"input_text": "text", "output_text": "text", "reasoning_text": "text", "refusal": "refusal"} | {
    IMAGE: "image_url"
}
CALLER: Neutral = {"caller": (None, {"type": "direct"}), "namespace": (None,)}
ECHOED = frozenset({"created_by", "status"})  # fields of output items, which clients send back

ItemId = Annotated[str, Field(min_length=1, max_length=ID_CHARS_MAX)]


class Part(Body):
    """Part of the content of an item: a text or an image."""

    # The model determines the number of tokens of an image; a client cannot set it.
    neutral: ClassVar[Neutral] = {"detail": (None, "auto"), "file_id": (None,)}
    ignored = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})

    type: str = Field(description="`input_text`, `input_image`, `output_text`, `refusal` or `reasoning_text`.")
    text: str | None = Field(default=None, description="Of the types `input_text`, `output_text` and `reasoning_text`.")
    refusal: str | None = Field(default=None, description="Of the type `refusal`: a text of the assistant.")
    image_url: str | None = Field(
        default=None, description="Of the type `input_image`: a URL with scheme http, https or data."
    )


Parts = Annotated[list[Part], Field(fail_fast=True)]


class ConversationItem(Body):
    """Base of the items. The `id` is the one in the list of input items; an item without one gets one there."""

    ignored = ECHOED

    id: ItemId | None = Field(default=None, description="Id in the list of input items.")


class MessageItem(ConversationItem):
    """Message of a conversation."""

    ignored = ECHOED | {"phase"}

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"] = Field(description="Author of the message.")
    content: str | Parts = Field(description="A text, or a list of [parts](#parts).")


class FunctionCallItem(ConversationItem):
    """Call of a function, from the output of an earlier response."""

    neutral: ClassVar[Neutral] = {**CALLER, "async": (None, False)}
    ignored = ECHOED | {"parsed_arguments"}  # the arguments as parsed by OpenAI's client

    type: Literal["function_call"]
    call_id: CallId = Field(description="Id of the call.")
    name: str = Field(description="Name of the function.")
    arguments: str = Field(description="JSON text, as the model wrote it.")


class FunctionOutputItem(ConversationItem):
    """Result of a call of a function."""

    neutral = CALLER
    ignored = ECHOED | {"name"}

    type: Literal["function_call_output"]
    call_id: CallId = Field(description="Id of an earlier `function_call`.")
    output: str | Parts = Field(description="A text, or a list of [parts](#parts).")


class ReasoningItem(ConversationItem):
    """Reasoning of the model before a message or a call."""

    neutral: ClassVar[Neutral] = {"encrypted_content": (None, "")}
    ignored = ECHOED | {"summary"}

    type: Literal["reasoning"]
    content: Parts | None = Field(default=None, description="Parts of the type `reasoning_text`.")


class ItemReference(Body):
    """Reference to an item of the output of a stored response, which takes the place of the reference."""

    type: Literal["item_reference"] | None = None
    id: ItemId = Field(description="Id of the item.")


class OtherItem(Body):
    """Item of a type that is not supported."""

    type: str

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        schema["not"] = {}


Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | ItemReference | OtherItem
KINDS: dict[str, type[Body]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}


def _tag(value: Any) -> str:
    if isinstance(value, Body):
        return type(value).__name__
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    kind = fields.get("type") or ("item_reference" if "id" in fields and "role" not in fields else "message")
    return (KINDS.get(kind, OtherItem) if isinstance(kind, str) else OtherItem).__name__


AnyItem = Annotated[
    Annotated[MessageItem, Tag("MessageItem")]
    | Annotated[FunctionCallItem, Tag("FunctionCallItem")]
    | Annotated[FunctionOutputItem, Tag("FunctionOutputItem")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")]
    | Annotated[ItemReference, Tag("ItemReference")]
    | Annotated[OtherItem, Tag("OtherItem")],
    Discriminator(_tag),
]
Items = Annotated[list[AnyItem], Field(fail_fast=True, min_length=1, max_length=MESSAGES_MAX)]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[AnyItem])


def plain(value: Any) -> Any:
    """Return an item as JSON, without fields that are null or have no effect."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if not isinstance(value, Body):
        return value
    fields = [(name, getattr(value, name)) for name in type(value).model_fields]
    return {name: plain(field) for name, field in fields if field is not None}


class ChatBuilder:
    """Builds the messages of a chat from the items of a conversation.

    Attributes:
        paths: path in the request body of the content of each message.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.paths: list[str] = []
        self._call_ids: set[str] = set()
        # Parts of the assistant's message that is being built.
        self._path = ""
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, path: str, item: Item) -> None:
        """Add the next item, which has this path in the request body.

        Raises ApiError (400) if the item, or a field of it, is not supported.
        """
        if isinstance(item, OtherItem | ItemReference):
            raise invalid(f"{path}: items of type {item.type} are not supported", path, "unsupported_parameter")
        reject_extra(item, f"{path}.")
        match item:
            case MessageItem(role="assistant"):
                self._begin(path)
                self._texts += _texts(item.content, f"{path}.content")
            case MessageItem():
                self.put(f"{path}.content", item.role, item.content)
            case FunctionCallItem():
                self._path = self._path or path
                function = CalledFunction(name=item.name, arguments=item.arguments)
                self._calls.append(ToolCall(id=item.call_id, function=function))
                self._call_ids.add(item.call_id)
            case FunctionOutputItem():
                if item.call_id not in self._call_ids:
                    text = f"no earlier function_call has the call_id {item.call_id!r}; send the call, too"
                    raise invalid(f"{path}.call_id: {text}", f"{path}.call_id")
                self.put(f"{path}.output", "tool", item.output, item.call_id)
            case ReasoningItem():
                self._begin(path)
                self._reasoning += _texts(item.content or [], f"{path}.content")

    def put(self, path: str, role: Role, content: str | list[Part], call_id: str | None = None) -> None:
        """Add a message that is not the assistant's, whose content has this path in the request body."""
        self.finish()
        parts = content if isinstance(content, str) else list(_parts(content, path))
        self.messages.append(Message(role=role, content=parts, tool_call_id=call_id))
        self.paths.append(path)

    def finish(self) -> None:
        """Add the assistant's message that is being built, if there is one."""
        if not self._path:
            return
        content = None if self._calls and not self._texts else "".join(self._texts)
        reasoning, calls = "".join(self._reasoning) or None, self._calls or None
        self.messages.append(Message(role="assistant", content=content, tool_calls=calls, reasoning_content=reasoning))
        self.paths.append(self._path)
        self._path, self._reasoning, self._texts, self._calls = "", [], [], []

    def _begin(self, path: str) -> None:
        """Begin a message of the assistant, unless the current one has no text and no calls yet."""
        if self._texts or self._calls:
            self.finish()
        self._path = self._path or path


def _texts(content: str | list[Part], path: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = list(_parts(content, path))
    for number, part in enumerate(parts):
        if part.text is None:
            raise invalid(f"{path}[{number}] is not a text, but an item of the assistant has only texts", path)
    return [part.text or "" for part in parts]


def _parts(content: list[Part], path: str) -> Iterator[ContentPart]:
    for number, part in enumerate(content):
        yield _part(part, f"{path}[{number}]")


def _part(part: Part, path: str) -> ContentPart:
    name = VALUE_OF.get(part.type)
    if name is None:
        raise invalid(f"{path}: parts of type {part.type} are not supported", path, "unsupported_parameter")
    reject_extra(part, f"{path}.")
    value: str | None = getattr(part, name)
    if value is None:
        raise invalid(f"{path}.{name} is missing", f"{path}.{name}")
    if part.type == IMAGE:
        return ContentPart(type="image_url", image_url=MediaUrl(url=value))
    return ContentPart(type="text", text=value)
