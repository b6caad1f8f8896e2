"""Tokens as the bytes that they stand for: half a character has bytes, but no text.

Vocabularies write bytes in two ways: byte-level ones have a printable character for each byte (GPT-2's table),
others write `▁` for a space and `<0x0A>` for a byte that is no character of its own.
"""

import re

from tokenizers import Tokenizer

BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of() -> dict[str, int]:
    """GPT-2's table: bytes that print stand for themselves, the others for what follows the last of 256."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printed)
    return {chr(byte): byte for byte in printed} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTE_OF = _byte_of()


class TokenBytes:
    """The bytes of each token of a tokenizer. `special` is the text of its special tokens by id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.special: dict[int, str] = {token_id: token.content for token_id, token in added.items() if token.special}
        self._added: dict[int, bytes] = {token_id: token.content.encode() for token_id, token in added.items()}
        self._tokenizer = tokenizer
        self._byte_level = tokenizer.decoder is not None and b'"ByteLevel"' in tokenizer.decoder.__getstate__()

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that the vocabulary lacks."""
        added = self._added.get(token_id)
        if added is not None:
            return added
        token: str = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_level:
            return bytes([BYTE_OF[char] for char in token]) if BYTE_OF.keys() >= set(token) else token.encode()
        found = BYTE.fullmatch(token)
        return bytes([int(found[1], 16)]) if found else token.replace("▁", " ").encode()
