"""Convert the text of a server that returns no token ids into tokens of the model.

Theory of operation. The log, the ingress and the parsers work on tokens. So the worker encodes the text with the
model's tokenizer. The tokens may differ from those that the server generated, but their text is the same: each piece is
encoded behind the last tokens before it, and is held back until its tokens decode to exactly this piece.
"""

from collections.abc import Callable, Sequence

CONTEXT_TOKENS = 8  # decoded in front of a piece, because the text of a token may depend on those before it
HELD_CHARS_MAX = 256  # longer text is encoded as well as possible, so that a stream never stops
ANCHOR = "\n"  # tokenizers add a space in front of a text, but not behind a new line, whose token has no other text

Encode = Callable[[str], list[int]]
"""Return the tokens of a text, without the special tokens around a prompt."""
Decode = Callable[[Sequence[int]], str]
"""Return the text of tokens."""


class TextEncoder:
    """Encodes the output text of one response.

    `inexact` counts pieces whose tokens do not decode to exactly their text.
    """

    def __init__(self, encode: Encode, decode: Decode) -> None:
        self._encode = encode
        self._decode = decode
        self._anchor = encode(ANCHOR)
        self._last = self._anchor
        self._held = ""
        self.inexact = 0

    def push(self, text: str, *, is_last: bool = False) -> list[int]:
        """Return the tokens of the next piece of text; empty if they are held back until more text is known.

        Nothing is held back if the piece is the last.
        """
        self._held += text
        if not self._held:
            return []
        before = self._decode(self._last)
        for token_ids in (
            self._behind(self._last, before),
            self._encode(self._held),
            self._behind(self._anchor, ANCHOR),
        ):
            if token_ids and self._decode(self._last + token_ids) == before + self._held:
                return self._take(token_ids)
        if not is_last and len(self._held) <= HELD_CHARS_MAX:
            return []
        self.inexact += 1
        return self._take(self._encode(self._held))

    def _behind(self, token_ids: list[int], text: str) -> list[int]:
        """Return the tokens of the held text behind a text and its tokens; empty if tokens span both texts."""
        together, begins = self._encode(text + self._held), len(token_ids)
        return together[begins:] if together[:begins] == token_ids else []

    def _take(self, token_ids: list[int]) -> list[int]:
        self._held = ""
        self._last = (self._last + token_ids)[-CONTEXT_TOKENS:]
        return token_ids
