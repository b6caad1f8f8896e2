"""Model cards for tests of the topic `models`."""

from collections.abc import Mapping
from hashlib import sha256

from forebay.events.models import ModelCard, ModelFile

FILES = {"config.json": b"{}", "tokenizer.json": b"a tokenizer" * 1_000}


def card_of(files: Mapping[str, bytes], context_tokens: int = 4_096) -> ModelCard:
    listed = [
        ModelFile(name=name, sha256=sha256(data).hexdigest(), size=len(data)) for name, data in sorted(files.items())
    ]
    return ModelCard(files=tuple(listed), context_tokens=context_tokens)
