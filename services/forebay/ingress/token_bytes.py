"""Map tokens to bytes. A token may be a part of a UTF-8 character, and then it has bytes but no text.

Byte-level vocabularies use a printable character per byte (GPT-2's table). Others write `▁` for a space and `<0x0A>`
for a byte that is not a character.
"""

import json
import re
from typing import Any

from tokenizers import Tokenizer

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
BYTES = 256
NFC_SHRINK = 4  # NFC composes at most 3 characters to one (Hangul), and shortens at most 3 bytes to 1 (Kelvin sign)
# Pre-tokenizers that only split text, or write each byte as a character. Others may drop text.
CUTTING = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
CUTTING_UNLESS_REMOVED = frozenset({"Punctuation", "Split"})


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


def text_chars_max(tokenizer: Tokenizer, tokens: int) -> int | None:
    """Return the maximum number of characters in a text of `tokens` tokens; None if the tokenizer allows no such bound.

    The bound exists if every byte of the text ends up in a token: then a token covers at most as many bytes as the
    longest token, and a character has at least one byte. This requires that each of the 256 bytes has a token, no
    normalizer or pre-tokenizer drops text, no added token strips the white space around it, and nothing is truncated.
    A factor accounts for normalizers that compose characters.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    byte_level = BYTE_OF.keys() <= vocabulary.keys()
    fallback = tokenizer.model.byte_fallback if hasattr(tokenizer.model, "byte_fallback") else False
    fallback = fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(BYTES))
    normalizers = _flat(tokenizer.normalizer, "normalizers")
    cutters = _flat(tokenizer.pre_tokenizer, "pretokenizers")
    shrink = 1
    for one in normalizers:
        factor = _shrink(one)
        if factor is None:
            return None
        shrink *= factor
    writes_bytes = any(one["type"] == "ByteLevel" for one in (*normalizers, *cutters))
    added = tokenizer.get_added_tokens_decoder().values()
    if (
        not (fallback or (byte_level and writes_bytes))
        or not all(map(_keeps_text, cutters))
        or any(token.lstrip or token.rstrip for token in added)
        or tokenizer.truncation is not None
    ):
        return None
    return tokens * shrink * max(len(token.encode()) for token in vocabulary)


def _flat(part: Any, members: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    settings = json.loads(part.__getstate__())
    found: list[dict[str, Any]] = []
    waiting = [settings]
    while waiting:
        one = waiting.pop()
        if one["type"] == "Sequence":
            waiting += one[members]
        else:
            found.append(one)
    return found


def _shrink(normalizer: dict[str, Any]) -> int | None:
    """Return the maximum factor by which a normalizer shortens a text, None if unknown."""
    kind = normalizer["type"]
    if kind in ("ByteLevel", "Prepend"):
        return 1
    if kind == "Replace":
        old = normalizer["pattern"].get("String")
        return 1 if old and len(normalizer["content"].encode()) >= len(old.encode()) else None
    return NFC_SHRINK if kind == "NFC" else None


def _keeps_text(cutter: dict[str, Any]) -> bool:
    kind = cutter["type"]
    return kind in CUTTING or (kind in CUTTING_UNLESS_REMOVED and cutter.get("behavior") != "Removed")
