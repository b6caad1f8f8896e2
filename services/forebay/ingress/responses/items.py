"""Items of a conversation of the Responses API, and the messages of a chat that they become.

Consecutive items of the assistant (reasoning, a message, calls of functions) become one message.
Source: OpenAI API reference, responses.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter

from forebay.ingress.body_limits import MESSAGES_MAX
from forebay.ingress.errors import invalid
from forebay.ingress.openai.chat_builder import ChatBuilder, Piece
from forebay.ingress.openai.fields import Body, Neutral, optional, require_fields
from forebay.ingress.openai.tools import CallId

ID_CHARS_MAX = 512  # of an item: its kind, its position, and the id of its response
MESSAGE, CALL, RESULT, REASONING = "message", "function_call", "function_call_output", "reasoning"
REFERENCE = "item_reference"
# Required and optional fields of an item, by its type.
FIELDS_OF: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    MESSAGE: (("role", "content"), ("id",)),
    CALL: (("call_id", "name", "arguments"), ("id",)),
    RESULT: (("call_id", "output"), ("id",)),
    REASONING: ((), ("id", "content")),
}
IMAGE = "input_image"
# Field with the value of a part, by the type of the part.
VALUE_OF = {"input_text": "text", "output_text": "text", "reasoning_text": "text", "refusal": "refusal"} | {
    IMAGE: "image_url"
}


class Part(Body):
    """Part of the content of an item: a text or an image."""

    # The model determines the number of tokens of an image; a client cannot set it.
    neutral: ClassVar[Neutral] = {"detail": (None, "auto"), "file_id": (None,)}
    ignored = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})

    type: str = Field(description="`input_text`, `input_image`, `output_text`, `refusal` or `reasoning_text`.")
    text: str | None = optional("Of the types `input_text`, `output_text` and `reasoning_text`.")
    refusal: str | None = optional("Of the type `refusal`: a text of the assistant.")
    image_url: str | None = optional("Of the type `input_image`: a URL, also with scheme data.")


Parts = Annotated[list[Part], Field(fail_fast=True)]


class Item(Body):
    """Item of a conversation. Items of the output of a response can be sent back unchanged."""

    neutral: ClassVar[Neutral] = {
        "async": (None, False),
        "caller": (None, {"type": "direct"}),
        "encrypted_content": (None, ""),
        "namespace": (None,),
    }
    ignored = frozenset({"created_by", "parsed_arguments", "phase", "status", "summary"})

    type: str | None = optional(
        "`message` (default), `function_call`, `function_call_output`, `reasoning` or `item_reference`."
    )
    id: Annotated[str, Field(min_length=1, max_length=ID_CHARS_MAX)] | None = optional(
        "Of an `item_reference`: an item in the output of a stored response. Else shown in the list of items."
    )
    role: Literal["user", "assistant", "system", "developer"] | None = optional("Of a `message`.")
    content: str | Parts | None = optional("Of a `message`: a text or [parts](#parts). Of `reasoning`: parts.")
    call_id: CallId | None = optional("Of a `function_call` and its `function_call_output`.")
    name: str | None = optional("Of a `function_call`: the function.")
    arguments: str | None = optional("Of a `function_call`: JSON text, as the model wrote it.")
    output: str | Parts | None = optional("Of a `function_call_output`: a text or [parts](#parts).")

    @property
    def kind(self) -> str:
        return self.type or (REFERENCE if self.role is None and self.id is not None else MESSAGE)


Items = Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MESSAGES_MAX)]
ITEMS = TypeAdapter(list[Item])


def plain(value: Any) -> Any:
    """Return an item as JSON, without fields that are null or have no effect."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if not isinstance(value, Body):
        return value
    fields = [(name, getattr(value, name)) for name in type(value).model_fields]
    return {name: plain(field) for name, field in fields if field is not None}


def listed(items: Sequence[Item], response_id: str) -> list[dict[str, Any]]:
    """Return the items of a conversation as the list of the input items of a response shows them."""
    found: dict[str, dict[str, Any]] = {}
    for at, item in enumerate(items):
        own = f"in_{at}_{response_id}"
        item_id = own if item.id is None or item.id in found else item.id  # clients may send one id twice
        found[item_id] = _listed(item, item_id)
    return [*found.values()]


def _listed(item: Item, item_id: str) -> dict[str, Any]:
    found: dict[str, Any] = {"status": "completed", **plain(item), "id": item_id, "type": item.kind}
    if item.kind == REASONING:
        found["summary"] = []
    if item.kind == MESSAGE and isinstance(item.content, str):
        found["content"] = [{"type": "output_text" if item.role == "assistant" else "input_text", "text": item.content}]
    parts = found.get("content", found.get("output"))
    for part in parts if isinstance(parts, list) else ():
        part.update({"output_text": {"annotations": []}, IMAGE: {"detail": "auto"}}.get(part["type"], {}))
    return found


def add_item(chat: ChatBuilder, path: str, item: Item) -> None:
    """Add the next item of a conversation, which has this path in the request body.

    Raises ApiError (400) if the item, or a field of it, is not supported.
    """
    if item.kind not in FIELDS_OF:  # also a reference that no stored response has replaced
        raise invalid(f"{path}: items of type {item.kind} are not supported", path, "unsupported_parameter")
    require_fields(item, path, item.kind, *FIELDS_OF[item.kind])
    match item.kind:
        case "message" if item.role is not None and item.role != "assistant":
            chat.put(item.role, _pieces(item.content, f"{path}.content"))
        case "function_call_output":
            chat.put_result(f"{path}.call_id", item.call_id, _pieces(item.output, f"{path}.output"))
        case "function_call":
            chat.call(item.call_id, item.name, item.arguments or "")
        case kind:
            if chat.texts or chat.calls:
                chat.finish()
            texts = chat.reasoning if kind == REASONING else chat.texts
            texts += _texts(item.content, f"{path}.content")


def _texts(content: str | list[Part] | None, path: str) -> list[str]:
    pieces = _pieces(content, path)
    for piece in pieces:
        if piece.url is not None:
            raise invalid(f"{piece.path} is not a text, but an item of the assistant has only texts", path)
    return [piece.text for piece in pieces]


def _pieces(content: str | list[Part] | None, path: str) -> list[Piece]:
    if isinstance(content, str):
        return [Piece(content)]
    return [_piece(part, f"{path}[{at}]") for at, part in enumerate(content or ())]


def _piece(part: Part, path: str) -> Piece:
    name = VALUE_OF.get(part.type)
    if name is None:
        raise invalid(f"{path}: parts of type {part.type} are not supported", path, "unsupported_parameter")
    require_fields(part, path, part.type, (name,))
    value: str = getattr(part, name)
    return Piece(url=value, path=f"{path}.{name}") if part.type == IMAGE else Piece(value)
