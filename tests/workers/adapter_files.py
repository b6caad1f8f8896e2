"""Files of LoRA adapters, for tests."""

import json
from pathlib import Path
from typing import Any

CONFIG = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "org/base"}
WEIGHTS = b"weights" * 1_000


def files(weights: bytes = WEIGHTS, **config: Any) -> dict[str, bytes]:
    return {
        "adapter_config.json": json.dumps({**CONFIG, **config}).encode(),
        "adapter_model.safetensors": weights,
        "README.md": b"# An adapter",
    }


def written(folder: Path, content: dict[str, bytes]) -> str:
    """Write files, and return the URI of their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder.as_uri()
