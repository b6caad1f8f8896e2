"""Create a tiny deterministic Llama with random weights that every engine can load, and a LoRA for it, 300 KB.

Every engine generates the same tokens greedily, so the tokens of one engine are the oracle of another. Needs torch
and transformers: `.venv-engines/bin/python -m tests.harness.models.make_tiny_model DIR [--lora DIR]`.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

SEED = 0
VOCABULARY = 512
CONTEXT_TOKENS = 2048
LAYERS, HIDDEN, HEADS, KV_HEADS = 2, 64, 2, 1
LORA_RANK, LORA_ALPHA = 4, 8
TEXTS = [
    "the quick brown fox jumps over the lazy dog. " * 4,
    "hello world, tell me a story about a cache of blocks.",
    "def f(x):\n    return x + 1\n",
    "user assistant system: you are a helpful assistant.",
] * 50
START, END, PAD = "<s>", "</s>", "<pad>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of 363 tokens: start 0, end 1, padding 2."""
    made = Tokenizer(models.BPE(unk_token=None))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=[START, END, PAD, "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=START, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def lora(
    rank: int = LORA_RANK, *, layers: int = LAYERS, hidden: int = HIDDEN, kv_width: int = KV_HEADS * HIDDEN // HEADS
) -> dict[str, torch.Tensor]:
    """Return LoRA weights of the query and value projections, large enough to change the output."""
    random = torch.Generator().manual_seed(SEED)
    sizes = {"q_proj": hidden, "v_proj": kv_width}
    weights = {}
    for layer in range(layers):
        for name, size in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, hidden, generator=random) * 0.5
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, rank, generator=random) * 0.5
    return weights


def write_model(directory: Path) -> None:
    model().save_pretrained(directory)
    tokenizer().save_pretrained(directory)


def write_lora(directory: Path, rank: int = LORA_RANK, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write the LoRA directory in PEFT's format, by default for the tiny model."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights or lora(rank), directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Write the directories of the command line and print the checksums of the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="directory to write the model to")
    parser.add_argument("--lora", type=Path, help="directory to write the LoRA to")
    arguments = parser.parse_args()
    disable_progress_bar()
    write_model(arguments.model)
    written = [arguments.model / "model.safetensors"]
    if arguments.lora:
        write_lora(arguments.lora)
        written.append(arguments.lora / "adapter_model.safetensors")
    for path in written:
        print(f"{checksum(path)}  {path}")


if __name__ == "__main__":
    main()
