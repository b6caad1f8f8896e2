"""The transformers engine on real models generates the tokens of a plain greedy loop over the library."""

import asyncio
import json
import shutil
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.block_hashes import sequence_hashes
from forebay.events.base import pack_u32, unpack_u32
from forebay.events.fleet import WorkerSpec
from forebay.events.requests import Sampling, TokenBias
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineBatch, EngineError
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.transformers.engine import TransformersEngine
from tests.engines.oracle import GREEDY, Transformers

BLOCK = 16
PATIENCE_S = 120.0
SPEC = WorkerSpec(worker_id="w", model="m", block_size=1, kv_blocks_total=1, max_num_seqs=1, max_num_batched_tokens=1)


class Running:
    """A running engine and its published batches."""

    def __init__(self, engine: TransformersEngine, spec: WorkerSpec) -> None:
        self.engine = engine
        self.spec = spec
        self.batches: list[EngineBatch] = []

    def generate(self, name: str, prompt: list[int], max_tokens: int = 8, **sampling: Any) -> None:
        self.send(name, prompt, Sampling(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True} | sampling))

    def send(self, name: str, prompt: list[int], sampling: Sampling, **changes: Any) -> None:
        packed = pack_u32(prompt)
        item = WorkItem(
            request_id=name,
            attempt=1,
            owner_epoch=0,
            worker_epoch=0,
            rank=0,
            token_ids=packed,
            sequence_hashes=sequence_hashes(packed, self.spec.block_size),
            reply_slot=0,
            sampling=sampling,
        )
        self.engine.submit(msgspec.structs.replace(item, **changes))

    def output(self, name: str) -> list[int]:
        chunks = [chunk for batch in self.batches for chunk in batch.emitted if chunk.request_id == name]
        return [token for chunk in chunks for token in unpack_u32(chunk.token_ids)]

    def ended(self) -> set[str]:
        finished = {end.request_id for batch in self.batches for end in batch.finished}
        return finished | {failed.request_id for batch in self.batches for failed in batch.failed}

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - batches set no event
                await asyncio.sleep(0.005)

    async def outputs(self, *names: str) -> list[list[int]]:
        await self.until(lambda: self.ended().issuperset(names))
        return [self.output(name) for name in names]


@asynccontextmanager
async def running(model: Path, **changes: Any) -> AsyncIterator[Running]:
    fields: dict[str, Any] = {"model": model, "model_name": "m", "block_size": BLOCK}
    engine = TransformersEngine(EngineSettings(**{**fields, **changes}))
    one = Running(engine, await engine.start(SPEC))
    task = asyncio.create_task(engine.run(one.batches.append))
    try:
        yield one
        assert not task.done(), task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.stop()


async def test_greedy_tokens_equal_those_of_the_oracle(model: Path, oracle: Transformers) -> None:
    async with running(model) as one:
        assert (one.spec.tasks, one.spec.kv_events) == (("generate", "embed"), False)
        for number, (prompt, expected) in enumerate(GREEDY):
            one.generate(f"{number}", prompt, len(expected))
        assert await one.outputs(*map(str, range(len(GREEDY)))) == [expected for _, expected in GREEDY]
        one.generate("long", list(range(200, 330)), 16)
        assert await one.outputs("long") == [oracle.greedy(list(range(200, 330)), 16)]


async def test_a_cancelled_request_emits_no_more_tokens(model: Path) -> None:
    async with running(model) as one:
        one.generate("cancelled", list(range(100, 120)), 900)
        one.generate("next", list(range(100, 130)), 5)
        await one.until(lambda: len(one.output("cancelled")) > 2)
        one.engine.cancel("cancelled")
        await one.outputs("next")
        assert len(one.output("cancelled")) < 900
        assert "cancelled" not in one.ended()


async def test_sampled_tokens_depend_on_the_seed(model: Path) -> None:
    prompt = list(range(100, 140))
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 100, "min_p": 0.001}
    async with running(model) as one:
        for name, seed in (
            ("first", 7),
            ("same", 7),
            ("other", 8),
            ("negative", -8),
            ("none", None),
            ("none too", None),
        ):
            one.generate(name, prompt, 24, seed=seed, **sampling)
        one.generate("likeliest", prompt, 12, seed=7, temperature=1.0, top_k=1)
        first, same, other, negative, none, none_too, likeliest = await one.outputs(
            "first", "same", "other", "negative", "none", "none too", "likeliest"
        )
    assert first == same
    assert len({tuple(tokens) for tokens in (first, other, negative, none, none_too)}) == 5
    assert likeliest == GREEDY[1][1]


async def test_stop_tokens_and_limits_end_the_generation(model: Path, tmp_path: Path) -> None:
    prompt, tokens = GREEDY[0]
    ends = tmp_path / "ends"
    shutil.copytree(model, ends)
    settings = json.loads((ends / "generation_config.json").read_text())
    changes = {"eos_token_id": [1, tokens[3]], "temperature": 9.0, "do_sample": True, "repetition_penalty": 5.0}
    (ends / "generation_config.json").write_text(json.dumps({**settings, **changes}))
    async with running(ends) as one:
        one.generate("eos", prompt, 8, ignore_eos=False)
        one.generate("stop token", prompt, 8, stop_token_ids=(tokens[1],))
        one.generate("minimum", prompt, 8, ignore_eos=False, min_tokens=5)
        one.generate("biased", prompt, 3, logit_bias=(TokenBias(token_id=42, bias=100.0),))
        one.generate("penalty", prompt, 3, logit_bias=(TokenBias(token_id=42, bias=9.0),), repetition_penalty=1e9)
        eos, stop, minimum, biased, penalty = await one.outputs("eos", "stop token", "minimum", "biased", "penalty")
        reasons = {end.request_id: end.reason for batch in one.batches for end in batch.finished}
    assert (eos, stop, biased) == (tokens[:4], tokens[:2], [42, 42, 42])
    assert minimum[:3] == tokens[:3]
    assert tokens[3] not in minimum[:5]
    assert penalty.count(42) <= 1
    assert reasons == {
        "eos": "stop",
        "stop token": "stop",
        "minimum": "length",
        "biased": "length",
        "penalty": "length",
    }


@pytest.mark.parametrize("sampling", [{"temperature": -1.0}, {"temperature": 1.0, "min_p": 2.0}])
async def test_an_invalid_sampling_parameter_fails_its_request(model: Path, sampling: dict[str, Any]) -> None:
    async with running(model) as one:
        one.generate("invalid", [5, 6, 7], 4, **sampling)
        await one.outputs("invalid")
        assert [failed.error.status for batch in one.batches for failed in batch.failed] == [400]


async def test_an_embedding_is_the_mean_of_the_last_hidden_states(model: Path) -> None:
    import torch  # noqa: PLC0415 - tests are collected without it, too
    from transformers import AutoModel  # noqa: PLC0415

    plain = AutoModel.from_pretrained(model, dtype=torch.float32)
    prompts = {"short": [5], "long": list(range(100, 200))}
    async with running(model) as one:
        for name, prompt in prompts.items():
            one.send(name, prompt, Sampling(max_tokens=1), task="embed")
        await one.outputs(*prompts)
        vectors = {vector.request_id: vector.packed for batch in one.batches for vector in batch.vectors}
    for name, prompt in prompts.items():
        with torch.inference_mode():
            mean = plain(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0)
        expected = torch.nn.functional.normalize(mean, dim=0)
        found = torch.tensor(struct.unpack(f"<{len(expected)}f", vectors[name]))
        assert torch.allclose(found, expected, atol=1e-5)


def config_of(kind: str) -> Any:
    import transformers  # noqa: PLC0415 - tests are collected without it, too

    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    match kind:
        case "mistral":  # every layer sees the last tokens only
            return transformers.MistralConfig(**sizes, sliding_window=20)
        case "gemma3":  # some layers do, and embeddings are scaled
            types = ["sliding_attention", "full_attention", "sliding_attention"]
            return transformers.Gemma3TextConfig(**sizes, head_dim=8, sliding_window=20, layer_types=types)
        case "gpt2":  # learned positions
            return transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=256)
        case "bloom":  # positions by a slope on the mask
            return transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4)
        case "mamba":  # a state instead of a KV cache
            return transformers.MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2)
    raise AssertionError(kind)


def greedy(directory: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """The most likely continuation, computed without any cache."""
    import torch  # noqa: PLC0415 - tests are collected without it, too
    import transformers  # noqa: PLC0415

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(max_tokens):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def save_model(kind: str, directory: Path) -> Path:
    import torch  # noqa: PLC0415 - tests are collected without it, too
    import transformers  # noqa: PLC0415

    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config_of(kind)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", ["mistral", "gemma3", "gpt2", "bloom", "mamba"])
async def test_models_of_other_architectures_generate_the_tokens_of_the_oracle(kind: str, tmp_path: Path) -> None:
    directory = save_model(kind, tmp_path)
    prompts = {f"{length}": [(length * at + 3) % 290 for at in range(length)] for length in (70, 7)}
    async with running(directory) as one:
        for name, prompt in prompts.items():
            one.generate(name, prompt, 20)
        outputs = await one.outputs(*prompts)
    assert outputs == [greedy(directory, prompt, 20) for prompt in prompts.values()]


def damaged(directory: Path, how: str) -> Path:
    match how:
        case "missing":
            return directory / "nowhere"
        case "empty":
            (directory / "empty").mkdir()
            return directory / "empty"
    weights = directory / "model.safetensors"
    match how:
        case "no weights":
            weights.unlink()
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:1000])
        case "unknown":
            config = json.loads((directory / "config.json").read_text())
            (directory / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
        case "incomplete":
            from safetensors.torch import load_file, save_file  # noqa: PLC0415 - imports torch

            tensors = load_file(weights)
            del tensors["model.layers.1.mlp.up_proj.weight"]
            save_file(tensors, weights, {"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "no such model directory"),
        ("empty", "transformers cannot load the model: "),
        ("no weights", "transformers cannot load the model: "),
        ("truncated", "transformers cannot load the model: "),
        ("unknown", "transformers cannot load the model: "),
        ("incomplete", "1 weights are missing, the first is model.layers.1.mlp.up_proj.weight"),
    ],
)
async def test_start_reports_a_damaged_model_directory_in_one_line(
    model: Path, tmp_path: Path, how: str, message: str
) -> None:
    shutil.copytree(model, tmp_path / "model")
    engine = TransformersEngine(EngineSettings(model=damaged(tmp_path / "model", how), model_name="m"))
    with pytest.raises(EngineError) as failed:
        await engine.start(SPEC)
    await engine.stop()
    assert message in str(failed.value)
    assert len(str(failed.value).splitlines()) == 1
    assert len(str(failed.value)) < 700


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arguments": {"no_such_argument": 1}}, "no_such_argument"),
        ({"arguments": {"threads": 0}}, "cannot load the model"),
        ({"max_num_seqs": 9}, "got max_num_seqs 9"),
    ],
)
async def test_start_reports_invalid_arguments_in_one_line(model: Path, changes: dict[str, Any], message: str) -> None:
    engine = TransformersEngine(EngineSettings(**{"model": model, "model_name": "m", **changes}))
    with pytest.raises(EngineError) as failed:
        await engine.start(SPEC)
    await engine.stop()
    assert message in str(failed.value)
    assert len(str(failed.value).splitlines()) == 1


async def test_engine_arguments_select_bfloat16_and_eager_attention(model: Path) -> None:
    arguments = {"dtype": "bfloat16", "attn_implementation": "eager", "threads": 1}
    async with running(model, arguments=arguments) as one:
        one.generate("a", GREEDY[0][0], 8)
        one.generate("b", GREEDY[2][0], 6)
        assert await one.outputs("a", "b") == [GREEDY[0][1], GREEDY[2][1][:6]]
