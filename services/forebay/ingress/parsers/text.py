"""An answer's text as its tokens come: decoded piece by piece, cut at the first stop string."""

from collections.abc import Sequence

from forebay.ingress.model import Decoder


class TextAssembler:
    """Gives out text that is certain: what could be the beginning of a stop string is held back."""

    __slots__ = ("_decoder", "_held", "_stops", "stopped")

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, token_ids: list[int]) -> str:
        """The text that may go out now. Nothing follows once `stopped`."""
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
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


def split_at_overlap(text: str, tag: str) -> tuple[str, str]:
    """What is certain not to begin `tag`, and the end that may."""
    keep = _overlap(text, tag)
    return text[: len(text) - keep], text[len(text) - keep :]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that a stop string begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
