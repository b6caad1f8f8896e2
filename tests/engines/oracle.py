"""Expected greedy tokens of the tiny model, and transformers as an oracle for others."""

import json
from collections.abc import Sequence
from pathlib import Path

# sha256 of the weights that the tokens below were made with: where they differ, so may the tokens.
MODEL_SHA256 = "448177f144cf279078fde212f834306c7ceffac3290968fd2af0090a009d177f"
LORA_SHA256 = "a6cf48d8a85f79c05d24200d95168640a91b134f33e9c8576329019539743a29"

# Prompt and continuation, both token ids. SGLang and llama.cpp generate the same tokens.
GREEDY: list[tuple[list[int], list[int]]] = [
    ([360, 359], [49, 378, 310, 217, 305, 147, 164, 190]),  # hello world
    (list(range(100, 140)), [235, 241, 264, 106, 295, 128, 415, 47, 149, 120, 231, 29]),
    (list(range(100, 180)), [163, 417, 108, 242, 416, 503, 40, 119, 312, 62, 316, 182, 212, 155, 340, 159]),
    ([100 + (i * 7) % 200 for i in range(100)], [423, 310, 34, 197, 356, 458, 286, 60, 218, 202, 197, 356]),
]


class Transformers:
    """Model of a directory in float32, optionally with the merged weights of a LoRA."""

    def __init__(self, directory: Path, lora: Path | None = None) -> None:
        import torch  # noqa: PLC0415 - tests are collected without it, too
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        if lora is not None:
            self._merge(lora)

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a chat by the model's template."""
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(text)["input_ids"])

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The likeliest continuation, `max_tokens` long, over the end of the text."""
        torch, tokens = self._torch, list(prompt)
        with torch.inference_mode():
            seen = self._model(torch.tensor([tokens]), use_cache=True)
            generated = [int(seen.logits[0, -1].argmax())]
            while len(generated) < max_tokens:
                seen = self._model(torch.tensor([generated[-1:]]), past_key_values=seen.past_key_values, use_cache=True)
                generated.append(int(seen.logits[0, -1].argmax()))
        return generated

    def _merge(self, lora: Path) -> None:
        from safetensors.torch import load_file  # noqa: PLC0415 - as torch

        config = json.loads((lora / "adapter_config.json").read_text())
        weights = load_file(lora / "adapter_model.safetensors")
        for name, low in weights.items():
            if ".lora_A." not in name:
                continue
            high = weights[name.replace(".lora_A.", ".lora_B.")]
            module = self._model.get_submodule(name.removeprefix("base_model.model.").partition(".lora_A.")[0])
            with self._torch.no_grad():
                module.weight += config["lora_alpha"] / config["r"] * high @ low
