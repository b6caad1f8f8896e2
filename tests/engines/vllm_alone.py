"""vLLM without forebay: greedy tokens of the model DIR for the prompts on stdin, JSON lists of token ids, both ways."""

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    """Print the result on the last line of stdout, which vLLM also uses."""
    requested = json.load(sys.stdin)
    llm = LLM(
        sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        num_gpu_blocks_override=64,
        max_num_seqs=8,
    )
    generated = []
    for prompt, max_tokens in requested:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        generated.append(list(answer.outputs[0].token_ids))
    print(json.dumps(generated))


if __name__ == "__main__":
    main()
