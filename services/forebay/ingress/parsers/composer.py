"""Turn output tokens into deltas, the consecutive parts of a response.

The steps are: detokenize, end at stop strings, parse reasoning and tool calls, and add log probabilities.
"""

from collections.abc import Sequence

import msgspec

from forebay.events.tokens import TokenLogprob
from forebay.ingress.model import Decoder, Model
from forebay.ingress.parsers.call_scanner import split_at_overlap
from forebay.ingress.parsers.deltas import EMPTY_DELTA, DecodedLogprob, OutputDelta, Parser, is_json, merge_deltas
from forebay.ingress.parsers.parsers import ParserChain
from forebay.ingress.parsers.selection import ParseOptions, ParserFactory
from forebay.ingress.token_bytes import TokenBytes

LOGPROB_MIN = -9999.0  # OpenAI's value for a probability near zero; JSON has no minus infinity


class OutputPlan(msgspec.Struct, frozen=True):
    """How the output tokens of one request become text, tool calls and log probabilities.

    Attributes:
        parsing: options of the parser for reasoning and tool calls; None to parse nothing.
        logprobs: number of alternative tokens to report per output token; None reports no log probabilities at all.
        special: whether the text contains special tokens.
        echo: text with which the response begins, before the output.
    """

    stops: Sequence[str] = ()
    parsing: ParseOptions | None = None
    logprobs: int | None = None
    special: bool = False
    echo: str = ""

    def composer(self, model: Model, parsers: ParserFactory, request_id: str) -> "Composer":
        """Return a new composer for a response. The ids of its tool calls are derived from `request_id`."""
        options = self.parsing
        visible = None if self.special else () if options is None else parsers.visible_tokens(options)
        parser = None if options is None else parsers.parser(options, request_id)
        text = TextAssembler(model.decoder(visible), self.stops)
        logprobs = None if self.logprobs is None else (model.token_bytes, self.logprobs)
        return Composer(text, parser, logprobs, self.echo)


class TextAssembler:
    """Detokenizes one response until a stop string is found. Text that may begin a stop string is buffered.

    `stop` is the stop string that was found, empty before that.
    """

    __slots__ = ("_decoder", "_held", "_stops", "has_stops", "stop")

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = stops
        self.has_stops = bool(stops)
        self._held = ""
        self.stop = ""

    def push(self, token_ids: list[int]) -> str:
        text = self._decoder.push(token_ids)
        if not self._stops:
            return text
        text = self._held + text
        cuts = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if cuts:
            cut, self.stop = min(cuts)
            self._held = ""
            return text[:cut]
        output, self._held = min(split_at_overlap(text, stop) for stop in self._stops)
        return output

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class Composer:
    """Turns the output tokens of one response into deltas: parts of the text, of tool calls and of log probabilities.

    Args:
        parser: splits the text into reasoning, content and tool calls; None to emit all text as content.
        logprobs: bytes of the model's tokens, and number of alternatives per output token; None reports none.

    Attributes:
        is_joinable: whether the merged deltas are the same if several tokens are pushed at once.
        stop: stop string that ended the response; empty if none has.
    """

    __slots__ = ("_arguments", "_echo", "_logprobs", "_parser", "_text", "is_joinable", "stop")

    def __init__(
        self,
        text: TextAssembler,
        parser: Parser | None = None,
        logprobs: tuple[TokenBytes, int] | None = None,
        echo: str = "",
    ) -> None:
        self._text = text
        self._parser = parser
        self._logprobs = logprobs
        self._echo = echo
        self._arguments: dict[int, list[str]] = {}  # parts of the arguments of each tool call, by its index
        self.stop = ""
        # A stop string ends the output at a token. Parsers of vLLM may depend on the parts in which they get the text.
        self.is_joinable = not text.has_stops and logprobs is None and isinstance(parser, ParserChain | None)

    def push(self, token_ids: list[int], logprob: TokenLogprob | None = None) -> OutputDelta:
        """Return the delta of the next output token, or of several if the composer is joinable.

        Text that could begin a stop string or a tag is kept back. `logprob` is that of the only token, if known.
        """
        text = self._text.push(token_ids)
        decoded: tuple[DecodedLogprob, ...] = ()
        if self._logprobs is not None and logprob is not None:
            names, count = self._logprobs
            top = tuple(
                DecodedLogprob(names[one.token_id], max(one.logprob, LOGPROB_MIN)) for one in logprob.top[:count]
            )
            decoded = (DecodedLogprob(names[token_ids[0]], max(logprob.logprob, LOGPROB_MIN), top),)
        self.stop = self._text.stop
        if self._echo:
            text, self._echo = self._echo + text, ""
        if self._parser is None:
            return OutputDelta(text, logprobs=decoded)
        delta = self._parser.push(text, token_ids)
        if self.stop:
            delta = merge_deltas([delta, self._parser.finish()])
        return self._record_calls(delta, decoded) if delta.calls or decoded else delta

    def finish(self) -> OutputDelta:
        text, self._echo = self._echo + self._text.finish(), ""
        if self._parser is None:
            return OutputDelta(text) if text else EMPTY_DELTA
        return self._record_calls(merge_deltas([self._parser.push(text, []), self._parser.finish()]))

    def reason(self, reason: str) -> str:
        """Return the finish reason for the client: `tool_calls` instead of `stop` if all tool calls are complete.

        A stop string, a stop token or the model itself may end the output inside of a call.
        """
        calls = self._arguments.values()
        is_called = reason == "stop" and calls and all(self._is_complete("".join(parts)) for parts in calls)
        return "tool_calls" if is_called else reason

    def _record_calls(self, delta: OutputDelta, decoded: tuple[DecodedLogprob, ...] = ()) -> OutputDelta:
        for call in delta.calls:
            self._arguments.setdefault(call.index, []).append(call.arguments)
        return OutputDelta(delta.content, delta.reasoning, delta.calls, decoded) if decoded else delta

    def _is_complete(self, arguments: str) -> bool:
        if not arguments:  # some parsers of vLLM emit nothing for a call without arguments
            return not self.stop
        return is_json(arguments)
