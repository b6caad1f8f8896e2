"""Which parsers an ingress uses, by name or by what the model's chat template shows, and the one for each answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.ingress.errors import Unusable, invalid
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

AUTO, NONE = "auto", "none"
TOOL_TAGS = {
    "hermes": (TOOL_CALL, END_TOOL_CALL),
    "llama3_json": (PYTHON_TAG,),
    "mistral": (TOOL_CALLS, ARGS, CALL_ID),
}
REASONING_TAGS = (THINK, END_THINK)
REASONING_NAMES = ("deepseek_r1", "qwen3")  # the first takes all for reasoning until its end tag


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """How the answer to one chat is to be taken apart.

    Attributes:
        choice: what it wants of its tools.
        is_open: its prompt ends within reasoning.
        structured: the engine holds it to a structure.
        prompt_ids: the tokens of its prompt, which vLLM's parsers look at.
    """

    choice: ToolSelection = NO_TOOLS
    is_open: bool = False
    structured: bool = False
    prompt_ids: Sequence[int] = ()


class ParserFactory:
    """The parsers of one ingress; empty names are none. Raises Unusable for names that nobody knows."""

    def __init__(self, model: Model, tool: str = AUTO, reasoning: str = AUTO) -> None:
        self._vllm: VllmParsers | None = None
        given = (tool, reasoning)
        if any(name.startswith(PREFIX) for name in given):
            if any(name not in (AUTO, NONE) and not name.startswith(PREFIX) for name in given):
                raise Unusable(f"--tool-call-parser {tool}, --reasoning-parser {reasoning}: both of vLLM's, or none")
            tool, reasoning = (name.removeprefix(PREFIX) if name.startswith(PREFIX) else "" for name in given)
            self._vllm = VllmParsers(model.directory, tool, reasoning)
            self.tool, self.reasoning = tool, reasoning
            return
        template = model.template_source
        self.tool = _tool_of(template) if tool == AUTO else _known("tool-call", tool, tuple(TOOL_TAGS))
        self.reasoning = (
            _reasoning_of(template) if reasoning == AUTO else _known("reasoning", reasoning, REASONING_NAMES)
        )

    def shown(self, how: ParseOptions) -> tuple[str, ...] | None:
        """The special tokens that must stay in the text for the parser to see them; None for all."""
        if self._vllm is not None:
            return None
        tags = REASONING_TAGS if self.reasoning else ()
        return tags + (TOOL_TAGS[self.tool] if self.tool and how.choice.tools else ())

    def require(self, choice: ToolSelection) -> None:
        """Raise ApiError when the model may call tools and nobody would see it."""
        if choice.tools and choice.forced is None and not self.tool:
            text = "tool_choice auto needs a parser: start the ingress with --tool-call-parser"
            raise invalid(text, "tools", "unsupported_parameter")

    def is_open(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within reasoning."""
        return prompt.rstrip().endswith(THINK)

    def parser(self, how: ParseOptions, request_id: str) -> Parser | None:
        """The parser of one answer, None when there is nothing to find."""
        choice = how.choice
        if not choice.tools and not self.reasoning:
            return None
        ids = call_ids(request_id, chars=9, prefix="") if self.tool == "mistral" else call_ids(request_id)
        if self._vllm is not None and choice.forced is None:
            return self._vllm.parser(choice, [*how.prompt_ids], ids)
        sink = DeltaCollector(ids, parallel=choice.parallel)
        link = self._calls(sink, choice)
        if self.reasoning and self._vllm is None:
            # The engine holds an answer with a structure to it from its first token on: then nothing is thought.
            begun = (how.is_open or self.reasoning == "deepseek_r1") and not how.structured
            link = ReasoningParser(sink, link, is_open=begun)
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
        raise Unusable(
            f"--{kind}-parser {name}: there is none of this name, only {', '.join((AUTO, NONE, *names))}, {PREFIX}NAME"
        )
    return name


def _tool_of(template: str) -> str:
    """The format that a chat template shows to its model."""
    if TOOL_CALLS in template:
        return "mistral"
    # Qwen 3 Coder and GLM have XML inside the same tag.
    if TOOL_CALL in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    return "llama3_json" if PYTHON_TAG in template else ""


def _reasoning_of(template: str) -> str:
    return "qwen3" if END_THINK in template else ""
