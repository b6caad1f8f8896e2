"""Tokens as the bytes that they stand for: half a character has bytes, but no text.

Vocabularies write bytes in two ways: byte-level ones have a printable character for each byte (GPT-2's table),
others write `▁` for a space and `<0x0A>` for a byte that is no character of its own.
"""

import json
import re
from typing import Any

from tokenizers import Tokenizer

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
BYTES = 256
NFC_SHRINK = 4  # characters to one composed character: at most 3 (Hangul), and at most 3 bytes to 1 (Kelvin sign)
# Pre-tokenizers that only cut, or write each byte as a character. Others may drop text.
CUTTING = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
CUTTING_UNLESS_REMOVED = frozenset({"Punctuation", "Split"})


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


def text_chars_max(tokenizer: Tokenizer, tokens: int) -> int | None:
    """Return a number of characters that no text of so many tokens exceeds, None for a tokenizer without such a bound.

    A token stands for at most as many bytes as the longest one has, and a character for at least one byte, if every
    byte of the text ends up in a token. That holds if each of the 256 bytes has a token, no normalizer or
    pre-tokenizer drops text, no added token swallows the white space around it, and nothing is truncated. A
    normalizer that composes characters is allowed for by a factor. Everything else gives no bound.
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
    """Return the settings of a normalizer or pre-tokenizer, or of each in a sequence."""
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
    """Return the factor by which a normalizer may shorten a text, None when it is not known."""
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
