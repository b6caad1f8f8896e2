"""Create a Llama with random weights that is large enough to be slow on a CPU, for measurements of its KV cache.

Its tokens depend on every token of the prompt. Needs torch and transformers:
`.venv-engines/bin/python -m tests.harness.models.make_slow_model DIR`.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from tests.harness.models import make_tiny_model
from tests.harness.models.make_tiny_model import SEED, VOCABULARY, tokenizer

CONTEXT_TOKENS = 8192
LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 8, 512, 8, 4, 1536
SPREAD = 0.06  # of random weights; with the default of 0.02 most prompts have the same answer


def model(layers: int = LAYERS) -> LlamaForCausalLM:
    """Return a Llama with 3.1 million random parameters per layer."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def write_model(directory: Path, layers: int = LAYERS) -> None:
    model(layers).save_pretrained(directory)
    tokenizer().save_pretrained(directory)


def write_lora(directory: Path, layers: int = LAYERS) -> None:
    weights = make_tiny_model.lora(layers=layers, hidden=HIDDEN, kv_width=KV_HEADS * HIDDEN // HEADS)
    make_tiny_model.write_lora(directory, weights=weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="directory to write the model to")
    parser.add_argument("--layers", type=int, default=LAYERS, help="number of layers")
    arguments = parser.parse_args()
    disable_progress_bar()
    write_model(arguments.model, arguments.layers)


if __name__ == "__main__":
    main()
