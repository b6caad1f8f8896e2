"""Incremental detokenization that ends at the first stop string."""

from collections.abc import Sequence

from forebay.ingress.model import Decoder


class TextAssembler:
    """Detokenizes one response and detects stop strings. Text that may begin a stop string is buffered.

    Attributes:
        stopped: whether a stop string was found. The text after it is dropped.
    """

    __slots__ = ("_decoder", "_held", "_stops", "stopped")

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, token_ids: list[int]) -> str:
        """Decode the next tokens, and return the text that cannot be a part of a stop string."""
        text = self._decoder.push(token_ids)
        if not self._stops:
            return text
        text = self._held + text
        cuts = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if cuts:
            self.stopped = True
            self._held = ""
            return text[: min(cuts)]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that was buffered until the end of the response."""
        held, self._held = self._held, ""
        return held


def split_at_overlap(text: str, tag: str) -> tuple[str, str]:
    """Split a text into the part that cannot belong to `tag`, and its longest suffix that may begin the tag."""
    keep = _overlap(text, tag)
    return text[: len(text) - keep], text[len(text) - keep :]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
