"""Map tokens to bytes. A token may be a part of a UTF-8 character, and then it has bytes but no text.

Byte-level vocabularies use a printable character per byte (GPT-2's table). Others write `▁` for a space and `<0x0A>`
for a byte that is not a character.
"""

import re

from tokenizers import Tokenizer

BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of() -> dict[str, int]:
    """Return GPT-2's table: a printable byte maps to itself, any other byte to a character from 256 on."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printed)
    return {chr(byte): byte for byte in printed} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTE_OF = _byte_of()


class TokenBytes:
    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.special: dict[int, str] = {token_id: token.content for token_id, token in added.items() if token.special}
        self._added: dict[int, bytes] = {token_id: token.content.encode() for token_id, token in added.items()}
        self._tokenizer = tokenizer
        self._byte_level = tokenizer.decoder is not None and b'"ByteLevel"' in tokenizer.decoder.__getstate__()

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token, empty for an unknown id."""
        added = self._added.get(token_id)
        if added is not None:
            return added
        token: str = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_level:
            return bytes([BYTE_OF[char] for char in token]) if BYTE_OF.keys() >= set(token) else token.encode()
        found = BYTE.fullmatch(token)
        return bytes([int(found[1], 16)]) if found else token.replace("▁", " ").encode()
