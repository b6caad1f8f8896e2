"""Create the default model directory: a tokenizer and a chat template, no weights, under 200 KB.

The tokenizer is a byte-level BPE, so it encodes any text. It is trained on sentences composed from a list of common
words, words.txt. The same library versions produce the same bytes.
"""

import argparse
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

DIRECTORY = Path(__file__).parents[3] / "services" / "forebay" / "ingress" / "default_model"
WORDS = Path(__file__).with_name("words.txt")
VOCABULARY = 3_000
SENTENCES = 6_000
SEED = 7
CONTEXT_TOKENS = 131_072
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
CHAT_TEMPLATE = """\
{# Tools as in Qwen 2.5 and 3. If thinking is on, the response begins with reasoning, which ends with </think>. #}
{% if tools %}
<|im_start|>system
{% if messages[0].role == "system" %}
{{ messages[0].content }}

{% endif %}
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools>

For each function call, return a JSON object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{% for message in messages %}
{% if not (tools and loop.first and message.role == "system") %}
<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
{{- "\\n" if message.content or not loop.first }}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
<|im_end|>
{% endif %}
{% endfor %}
{% set effort = reasoning_effort | default("none") %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking | default(effort not in ("none", "minimal")) %}
<think>
{% endif %}
{% endif %}
"""


def corpus() -> list[str]:
    """Return deterministic sentences of the words, with capitals, punctuation and numbers."""
    rng = random.Random(SEED)
    common = WORDS.read_text(encoding="utf-8").split()
    lines = []
    for _ in range(SENTENCES):
        words = [rng.choice(common) for _ in range(rng.randint(4, 14))]
        words[0] = words[0].capitalize()
        if rng.random() < 0.3:
            words.insert(rng.randrange(1, len(words)), str(rng.randrange(2_100)))
        if rng.random() < 0.4:
            words[rng.randrange(len(words) - 1)] += ","
        lines.append(" ".join(words) + rng.choice(".....?!:"))
    return lines


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True) for token in (PAD, START, END)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator(corpus(), trainer)
    return made


def files() -> dict[str, bytes]:
    config = {"model_type": "forebay-default", "max_position_embeddings": CONTEXT_TOKENS}
    tokenizer_config = {"bos_token": None, "eos_token": END, "pad_token": PAD, "chat_template": CHAT_TEMPLATE}
    compact = json.loads(tokenizer().to_str())
    return {
        "config.json": _json(config, indent=2),
        "generation_config.json": _json({"max_new_tokens": 256}, indent=2),  # a mock engine does not end by itself
        "tokenizer_config.json": _json(tokenizer_config, indent=2),
        "tokenizer.json": _json(compact, indent=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DIRECTORY)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (out / name).write_bytes(content)


def _json(content: object, indent: int | None) -> bytes:
    separators = (",", ":") if indent is None else None
    return (json.dumps(content, ensure_ascii=False, indent=indent, separators=separators) + "\n").encode()


if __name__ == "__main__":
    main()
