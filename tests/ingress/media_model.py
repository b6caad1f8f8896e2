"""Model directories that accept images and videos, derived from the default model."""

import json
from pathlib import Path
from typing import Any

from forebay.ingress.model import DEFAULT_MODEL

IMAGE, VIDEO = "<image>", "<video>"
IMAGE_TOKENS, VIDEO_TOKENS = 6, 9
LISTED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<{{ part['type'] }}>{% endif %}"
    "{% endfor %}{% endfor %}"
)
PLAIN = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
SHOWN = {"image_seq_length": IMAGE_TOKENS, "video_seq_length": VIDEO_TOKENS}


def make(directory: Path, template: str = LISTED, **config: Any) -> Path:
    """Create a model directory whose tokenizer has placeholders; `config` is added to its config.json."""
    tokenizer = json.loads((DEFAULT_MODEL / "tokenizer.json").read_bytes())
    first = max(*tokenizer["model"]["vocab"].values(), *(one["id"] for one in tokenizer["added_tokens"]), 0)
    like = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ids = {IMAGE: first + 1, VIDEO: first + 2}
    tokenizer["added_tokens"] += [{"id": number, "content": text, **like} for text, number in ids.items()]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    known = {"image_token_id": ids[IMAGE], "video_token_index": ids[VIDEO], **(config or SHOWN)}
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 4_096, **known}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory
