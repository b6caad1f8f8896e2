"""The transformers engine on real models: what it says is what transformers says, however it is scheduled."""

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
from forebay.engine_model.model import Removed, Stored
from forebay.events.base import pack_u32, unpack_u32, unpack_u64
from forebay.events.control import Command
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
    """An engine that runs, and what its batches said."""

    def __init__(self, engine: TransformersEngine, spec: WorkerSpec) -> None:
        self.engine = engine
        self.spec = spec
        self.batches: list[EngineBatch] = []

    def ask(self, name: str, prompt: list[int], max_tokens: int = 8, **sampling: Any) -> None:
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

    def said(self, name: str) -> list[int]:
        chunks = [chunk for batch in self.batches for chunk in batch.emitted if chunk.request_id == name]
        return [token for chunk in chunks for token in unpack_u32(chunk.token_ids)]

    def cached(self, name: str) -> int:
        return next(end.cached_tokens for batch in self.batches for end in batch.finished if end.request_id == name)

    def ended(self) -> set[str]:
        finished = {end.request_id for batch in self.batches for end in batch.finished}
        return finished | {failed.request_id for batch in self.batches for failed in batch.failed}

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - batches set no event
                await asyncio.sleep(0.005)

    async def answers(self, *names: str) -> list[list[int]]:
        await self.until(lambda: self.ended().issuperset(names))
        return [self.said(name) for name in names]


@asynccontextmanager
async def running(model: Path, **changes: Any) -> AsyncIterator[Running]:
    told: dict[str, Any] = {"model": model, "model_name": "m", "block_size": BLOCK, "kv_blocks": 64}
    engine = TransformersEngine(EngineSettings(**{**told, **changes}))
    one = Running(engine, await engine.start(SPEC))
    task = asyncio.create_task(engine.run(one.batches.append))
    try:
        yield one
        assert not task.done(), task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.stop()


async def test_greedy_tokens_are_those_of_transformers_with_and_without_a_cached_prefix(
    model: Path, oracle: Transformers
) -> None:
    async with running(model, max_num_batched_tokens=24) as one:
        assert one.spec.tasks == ("generate", "embed")
        prompts = [prompt for prompt, _ in GREEDY] + [list(range(200, 330)), list(range(100, 180))[:64]]
        expected = [oracle.greedy(prompt, 16) for prompt in prompts]
        for (_, listed), tokens in zip(GREEDY, expected, strict=False):
            assert tokens[: len(listed)] == listed
        cold = [f"cold {number}" for number in range(len(prompts))]
        warm = [f"warm {number}" for number in range(len(prompts))]
        for names in (cold, warm):
            for name, prompt in zip(names, prompts, strict=True):
                one.ask(name, prompt, 16)
            assert await one.answers(*names) == expected
        assert [one.cached(name) for name in warm] == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
        together = max(len(batch.emitted) for batch in one.batches)
        assert together > 3, "requests did not interleave"
        assert max(batch.load.running for batch in one.batches) > 3
        # It was announced under the names that an ingress gives.
        changes = [change for batch in one.batches for change in batch.cache_changes]
        announced = {block for change in changes if isinstance(change, Stored) for block in change.hashes}
        for prompt in prompts:
            assert announced.issuperset(unpack_u64(sequence_hashes(pack_u32(prompt), BLOCK)))


async def test_a_small_cache_forgets_the_oldest_and_says_so(model: Path, oracle: Transformers) -> None:
    async with running(model, kv_blocks=8) as one:
        prompts = {f"{number}": [10 + number, *range(100, 195)] for number in range(4)}
        for name, prompt in prompts.items():
            one.ask(name, prompt, 4)
        answers = await one.answers(*prompts)
        assert answers == [oracle.greedy(prompt, 4) for prompt in prompts.values()]
        held: set[int] = set()
        for batch in one.batches:
            assert batch.load.kv_blocks_used <= batch.load.kv_blocks_total == 8
            for change in batch.cache_changes:
                match change:
                    case Stored(hashes=hashes):
                        held.update(hashes)
                    case Removed(hashes=hashes):
                        held.difference_update(hashes)
            assert len(held) <= 8
        assert set(one.engine.held(0)) == held
        assert held.issuperset(unpack_u64(sequence_hashes(pack_u32(prompts["3"]), BLOCK)))
        assert held.isdisjoint(unpack_u64(sequence_hashes(pack_u32(prompts["0"]), BLOCK)))
        await one.engine.command(Command(action="clear_kv_blocks"))
        assert one.engine.held(0) == []
        one.ask("again", prompts["3"], 4)
        assert await one.answers("again") == [answers[3]]
        assert one.cached("again") == 0


async def test_a_cancelled_request_says_no_more(model: Path) -> None:
    async with running(model) as one:
        one.ask("gone", list(range(100, 120)), 900)
        one.ask("stays", list(range(100, 130)), 40)
        await one.until(lambda: len(one.said("gone")) > 2)
        one.engine.cancel("gone")
        await one.answers("stays")
        assert len(one.said("gone")) < 100
        assert one.batches[-1].load.kv_blocks_used == 0
        assert "gone" not in one.ended()


async def test_draws_depend_on_the_seed_and_the_position_alone(model: Path) -> None:
    prompt = list(range(100, 140))
    drawn: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 100, "min_p": 0.001}
    async with running(model) as one:
        one.ask("first", prompt, 24, seed=7, **drawn)
        (first,) = await one.answers("first")
        one.ask("same", prompt, 24, seed=7, **drawn)
        one.ask("other", prompt, 24, seed=8, **drawn)
        one.ask("none", prompt, 24, **drawn)
        one.ask("none too", prompt, 24, **drawn)
        one.ask("rest", prompt + first[:10], 14, seed=7, **drawn)
        one.ask("one", prompt, 12, seed=7, temperature=1.0, top_k=1)
        same, other, none, none_too, rest, likeliest = await one.answers(
            "same", "other", "none", "none too", "rest", "one"
        )
    assert first == same
    assert rest == first[10:], "another worker would go on otherwise"
    assert len({tuple(one) for one in (first, other, none, none_too)}) == 4
    assert likeliest == GREEDY[1][1]


async def test_it_stops_where_it_should(model: Path, tmp_path: Path) -> None:
    prompt, tokens = GREEDY[0]
    ends = tmp_path / "ends"
    shutil.copytree(model, ends)
    settings = json.loads((ends / "generation_config.json").read_text())
    (ends / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [1, tokens[3]]}))
    async with running(ends) as one:
        one.ask("eos", prompt, 8, ignore_eos=False)
        one.ask("own", prompt, 8, stop_token_ids=(tokens[1],))
        one.ask("later", prompt, 8, ignore_eos=False, min_tokens=5)
        one.ask("biased", prompt, 3, logit_bias=(TokenBias(token_id=42, bias=100.0),))
        eos, own, later, biased = await one.answers("eos", "own", "later", "biased")
        reasons = {end.request_id: end.reason for batch in one.batches for end in batch.finished}
    assert (eos, own, biased) == (tokens[:4], tokens[:2], [42, 42, 42])
    assert later[:3] == tokens[:3]
    assert tokens[3] not in later[:5]
    assert reasons == {"eos": "stop", "own": "stop", "later": "length", "biased": "length"}


async def test_an_embedding_is_the_mean_of_the_last_hidden_states(model: Path) -> None:
    import torch  # noqa: PLC0415 - tests are collected without it, too
    from transformers import AutoModel  # noqa: PLC0415

    plain = AutoModel.from_pretrained(model, dtype=torch.float32)
    prompts = {"short": [5], "long": list(range(100, 200))}
    async with running(model, max_num_batched_tokens=32) as one:
        one.ask("before", prompts["long"], 1)
        for name, prompt in prompts.items():
            one.send(name, prompt, Sampling(max_tokens=1), task="embed")
        await one.answers("before", *prompts)
        vectors = {vector.request_id: vector.packed for batch in one.batches for vector in batch.vectors}
        assert one.batches[-1].load.kv_blocks_used == 0
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
        case "mamba":
            return transformers.MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2)
    raise AssertionError(kind)


def made(kind: str, directory: Path) -> Path:
    import torch  # noqa: PLC0415 - tests are collected without it, too
    import transformers  # noqa: PLC0415

    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config_of(kind)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", ["mistral", "gemma3", "gpt2", "bloom"])
async def test_other_kinds_of_models_say_what_transformers_says(kind: str, model: Path, tmp_path: Path) -> None:
    directory = made(kind, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, directory)
    oracle = Transformers(directory)
    prompts = {f"{length}": [(length * at + 3) % 290 for at in range(length)] for length in (70, 7, 33)}
    async with running(directory, max_num_batched_tokens=24) as one:
        for again in ("", "again "):
            for name, prompt in prompts.items():
                one.ask(again + name, prompt, 30)
            answers = await one.answers(*[again + name for name in prompts])
            assert answers == [oracle.greedy(prompt, 30) for prompt in prompts.values()]
        assert one.cached("again 70") == 64


def spoilt(directory: Path, how: str) -> Path:
    match how:
        case "missing":
            return directory / "nowhere"
        case "empty":
            (directory / "empty").mkdir()
            return directory / "empty"
        case "mamba":
            return made("mamba", directory / "mamba")
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
    ("how", "says"),
    [
        ("missing", "no such model directory"),
        ("empty", "transformers cannot load it: "),
        ("no weights", "transformers cannot load it: "),
        ("truncated", "transformers cannot load it: "),
        ("unknown", "transformers cannot load it: "),
        ("incomplete", "1 weights are missing, the first is model.layers.1.mlp.up_proj.weight"),
        ("mamba", "MambaForCausalLM keeps a state that is no KV cache"),
    ],
)
async def test_a_broken_model_directory_is_a_clear_line(model: Path, tmp_path: Path, how: str, says: str) -> None:
    shutil.copytree(model, tmp_path / "model")
    engine = TransformersEngine(EngineSettings(model=spoilt(tmp_path / "model", how), model_name="m"))
    with pytest.raises(EngineError) as failed:
        await engine.start(SPEC)
    await engine.stop()
    assert says in str(failed.value)
    assert len(str(failed.value).splitlines()) == 1
    assert len(str(failed.value)) < 500


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arguments": {"no_such_argument": 1}}, "no_such_argument"),
        ({"arguments": {"threads": 0}}, "cannot load it"),
        ({"kv_blocks": 1}, "at least 2 KV blocks"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "must be at least max_num_seqs"),
        ({"kv_blocks": 1 << 40}, "does not run on"),
    ],
)
async def test_arguments_that_do_not_fit_are_a_clear_line(model: Path, changes: dict[str, Any], says: str) -> None:
    engine = TransformersEngine(EngineSettings(**{"model": model, "model_name": "m", **changes}))
    with pytest.raises(EngineError) as failed:
        await engine.start(SPEC)
    await engine.stop()
    assert says in str(failed.value)
    assert len(str(failed.value).splitlines()) == 1


async def test_bfloat16_and_eager_attention_are_arguments_away(model: Path) -> None:
    arguments = {"dtype": "bfloat16", "attn_implementation": "eager", "threads": 1}
    async with running(model, arguments=arguments) as one:
        one.ask("a", GREEDY[0][0], 8)
        one.ask("b", GREEDY[2][0], 6)
        assert await one.answers("a", "b") == [GREEDY[0][1], GREEDY[2][1][:6]]
