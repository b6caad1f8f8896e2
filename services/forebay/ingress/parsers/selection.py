"""Select the parsers of an ingress by name or by the model's chat template, and create one per response."""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.events.names import unknown_name
from forebay.ingress.errors import invalid
from forebay.ingress.model import Model
from forebay.ingress.openai.tools import NO_TOOLS, ToolSelection
from forebay.ingress.parsers.deltas import Parser
from forebay.ingress.parsers.parsers import (
    ARGS,
    CALL_ID,
    END_THINK,
    END_TOOL_CALL,
    PYTHON_TAG,
    THINK,
    TOOL_CALL,
    TOOL_CALLS,
    DeltaCollector,
    HermesParser,
    LlamaJsonParser,
    MistralParser,
    NamedCallParser,
    ParserChain,
    ParserStage,
    PlainText,
    ReasoningParser,
    RequiredCallParser,
    call_ids,
)
from forebay.ingress.parsers.vllm_parsers import PREFIX, VllmParsers
from forebay.runtime.errors import ConfigError

AUTO, NONE = "auto", "none"
TOOL_TAGS = {"hermes": (TOOL_CALL, END_TOOL_CALL), "llama3_json": (PYTHON_TAG,), "mistral": (TOOL_CALLS, ARGS, CALL_ID)}
REASONING_TAGS = (THINK, END_THINK)
REASONING_NAMES = ("deepseek_r1", "qwen3")  # deepseek_r1 treats all text before the end tag as reasoning


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """Options for parsing the response to one chat request.

    Attributes:
        is_open: whether the prompt ends with the tag that begins reasoning, so that the response begins inside it.
        structured: whether the engine constrains the output to a structure, such as a JSON schema.
        prompt_ids: token ids of the prompt, which vLLM's parsers need.
    """

    choice: ToolSelection = NO_TOOLS
    is_open: bool = False
    structured: bool = False
    prompt_ids: Sequence[int] = ()


class ParserFactory:
    """Creates one parser per response. `tool` and `reasoning` are names of parsers, `auto` or `none`.

    The chat template of the model determines the parsers for `auto`. Raises ConfigError for an unknown name.
    """

    def __init__(self, model: Model, tool: str = AUTO, reasoning: str = AUTO) -> None:
        self._vllm: VllmParsers | None = None
        given = (tool, reasoning)
        if any(name.startswith(PREFIX) for name in given):
            if any(name not in (AUTO, NONE) and not name.startswith(PREFIX) for name in given):
                raise ConfigError(
                    f"--tool-call-parser {tool}, --reasoning-parser {reasoning}: use vLLM for both or for neither"
                )
            tool, reasoning = (name.removeprefix(PREFIX) if name.startswith(PREFIX) else "" for name in given)
            self._vllm = VllmParsers(model.directory, tool, reasoning)
            self.tool, self.reasoning = tool, reasoning
            return
        template = model.template_source
        self.tool = _tool_of(template) if tool == AUTO else _known("tool-call", tool, tuple(TOOL_TAGS))
        self.reasoning = (
            _reasoning_of(template) if reasoning == AUTO else _known("reasoning", reasoning, REASONING_NAMES)
        )

    def visible_tokens(self, options: ParseOptions) -> tuple[str, ...] | None:
        """Return the special tokens that the decoder must keep in the text for the parser; None for all."""
        if self._vllm is not None:
            return None
        tags = REASONING_TAGS if self.reasoning else ()
        return tags + (TOOL_TAGS[self.tool] if self.tool and options.choice.tools else ())

    def require(self, choice: ToolSelection) -> None:
        """Raise ApiError if the model may call the tools in `choice`, but no tool call parser is selected."""
        if choice.tools and choice.forced is None and not self.tool:
            text = "tool_choice auto needs a parser: start the ingress with --tool-call-parser"
            raise invalid(text, "tools", "unsupported_parameter")

    def is_open(self, prompt: str) -> bool:
        """Return whether the response to this prompt begins inside reasoning, because the prompt ends with its tag."""
        return prompt.rstrip().endswith(THINK)

    def parser(self, options: ParseOptions, request_id: str) -> Parser | None:
        """Return a new parser for one response; None if it can contain neither tool calls nor reasoning."""
        choice = options.choice
        if not choice.tools and not self.reasoning:
            return None
        ids = call_ids(request_id, chars=9, prefix="") if self.tool == "mistral" else call_ids(request_id)
        if self._vllm is not None and choice.forced is None:
            return self._vllm.parser(choice, [*options.prompt_ids], ids)
        sink = DeltaCollector(ids, parallel=choice.parallel)
        link = self._calls(sink, choice)
        if self.reasoning and self._vllm is None:
            # The engine enforces a structure from the first output token on, so there is no reasoning.
            is_open = (options.is_open or self.reasoning == "deepseek_r1") and not options.structured
            link = ReasoningParser(sink, link, is_open=is_open)
        return ParserChain(sink, link)

    def _calls(self, sink: DeltaCollector, choice: ToolSelection) -> ParserStage:
        if not choice.tools:
            return PlainText(sink)
        if choice.forced is not None:
            return NamedCallParser(sink, choice.forced) if choice.forced else RequiredCallParser(sink)
        if self.tool == "hermes":
            return HermesParser(sink)
        if self.tool == "mistral":
            return MistralParser(sink)
        return LlamaJsonParser(sink, frozenset(tool.function.name for tool in choice.tools))


def _known(kind: str, name: str, names: tuple[str, ...]) -> str:
    if name == NONE:
        return ""
    if name not in names:
        raise ConfigError(f"--{kind}-parser: {unknown_name('parser', name, (AUTO, NONE, *names, f'{PREFIX}NAME'))}")
    return name


def _tool_of(template: str) -> str:
    """Return the tool call format that a chat template instructs its model to use, empty for none."""
    if TOOL_CALLS in template:
        return "mistral"
    # Qwen 3 Coder and GLM put XML inside the same tag.
    if TOOL_CALL in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    return "llama3_json" if PYTHON_TAG in template else ""


def _reasoning_of(template: str) -> str:
    return "qwen3" if END_THINK in template else ""
