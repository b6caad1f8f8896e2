"""What an ingress needs to render the response of a request, in addition to its output tokens."""

from typing import Annotated, Literal

from forebay.events.base import Count, Part
from forebay.events.privacy import DROPPED, KEPT, MODEL

RENDERER_VERSION = 1  # of the events that clients see; an ingress renders no request of a later version

Api = Literal["chat_completions", "completions", "embeddings", "responses", "messages", "endpoints"]


class Rendering(Part, frozen=True, kw_only=True):
    """How the output of a client's request becomes its response. Any ingress renders the same bytes from it.

    If the response has several choices or inputs, each is a request on the log. Only the first one has this part.

    Attributes:
        version: version of the renderer.
        api: API whose format the response has.
        model: name of the model or adapter, as the client wrote it.
        created_s: time of creation in the response, as Unix time in seconds.
        card: digest of the model card; empty for a model from a directory.
        tool_parser: name of the parser of tool calls; empty for none.
        reasoning_parser: name of the parser of reasoning; empty for none.
        parts: number of requests on the log that the response consists of.
        choices_per_prompt: number of choices per prompt.
        prompt_tokens: number of tokens of all prompts.
        stream: whether the client requested a stream.
        stops: strings that end the response.
        special: whether the text contains special tokens.
        echo: texts with which the choices of each prompt begin; empty for none.
        is_chat: whether the output is parsed for reasoning and tool calls.
        is_open: whether the output begins inside of reasoning.
        tools: functions that the model may call and the choice among them, as JSON; empty for none.
        options: further fields of the request that determine the response of its API, as JSON.
        input: items of the conversation, as JSON, if another request may continue it.
        is_kept: whether the answer is stored on the topic `answers`.
    """

    version: Count = RENDERER_VERSION
    api: Api
    model: Annotated[str, MODEL]
    created_s: Count
    card: Annotated[str, KEPT] = ""
    tool_parser: Annotated[str, KEPT] = ""
    reasoning_parser: Annotated[str, KEPT] = ""
    parts: Count = 1
    choices_per_prompt: Count = 1
    prompt_tokens: Count = 0
    stream: bool = False
    stops: Annotated[tuple[str, ...], DROPPED] = ()
    special: bool = False
    echo: Annotated[tuple[str, ...], DROPPED] = ()
    is_chat: bool = False
    is_open: bool = False
    tools: Annotated[str, DROPPED] = ""
    options: Annotated[str, DROPPED] = ""
    input: Annotated[str, DROPPED] = ""
    is_kept: bool = False
