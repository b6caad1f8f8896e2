"""vLLM that does not start or dies: a clear error each time, and no process left."""

import asyncio
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.ingress.model import Model
from forebay.processes.engines import tokenizer_probes
from forebay.workers.engine import EngineError
from forebay.workers.engines.vllm.engine import VllmEngine
from tests.engines.driven import driven
from tests.engines.vllm_settings import ARGUMENTS, SPEC, settings
from tests.harness.processes import descendants

pytestmark = pytest.mark.filterwarnings("ignore")  # as in test_vllm_engine

ROOT = Path(__file__).parents[2]


def children() -> set[int]:
    """Return the descendants of this process, but not the dead and not Python's own helpers."""
    found = descendants(os.getpid())
    return {pid for pid in found if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}


async def refused(engine: VllmEngine) -> str:
    before = children()
    with pytest.raises(EngineError) as caught:
        async with driven(engine, SPEC):
            pass
    assert children() <= before
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("breakage", "fragment"),
    [
        (shutil.rmtree, "no such model directory"),
        (lambda directory: (directory / "config.json").unlink(), "no config.json"),
        (lambda directory: (directory / "model.safetensors").unlink(), "no weights"),
        (lambda directory: (directory / "model.safetensors").write_bytes(b"not weights"), "are broken"),
        (lambda directory: (directory / "config.json").write_text("{"), "rejects these arguments"),
    ],
)
async def test_a_broken_model_directory(
    breakage: Callable[[Path], object], fragment: str, model: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "broken"))
    breakage(directory)
    generated = await refused(VllmEngine(settings(directory)))
    assert fragment in generated
    assert str(directory) in generated


async def test_a_tokenizer_that_the_ingress_does_not_have(model: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "qwen"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    # The class brings its own pre-tokenizer, which separates digits from the space before them.
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "Qwen2Tokenizer"}))
    probes = tokenizer_probes(Model(directory))
    error = await refused(VllmEngine(settings(directory, tokenizer_probes=probes)))
    assert f"the tokenizer of vLLM differs from {directory / 'tokenizer.json'}: '10 plus 25 is 35" in error
    assert "has 39 tokens (" in error and "but 40 tokens (" in error and "--allow-tokenizer-mismatch" in error


async def test_unknown_argument_of_vllm(model: Path) -> None:
    engine = VllmEngine(settings(model, arguments=ARGUMENTS | {"no_such_argument": 1}))
    assert "no_such_argument" in await refused(engine)


async def test_a_core_that_dies_at_its_start(model: Path) -> None:
    too_few = VllmEngine(settings(model, kv_blocks=3))
    assert "died while it started" in await refused(too_few)


async def test_a_start_that_is_cancelled_leaves_nothing(model: Path) -> None:
    before = children()
    engine = VllmEngine(settings(model))
    starting = asyncio.create_task(engine.start(SPEC))
    async with asyncio.timeout(120):
        while not children() - before:  # noqa: ASYNC110 - the start of a process has no event
            await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await engine.stop()
    assert children() <= before


async def test_an_embedding_model_and_a_core_that_is_killed(model: Path) -> None:
    before = children()
    arguments = ARGUMENTS | {"runner": "pooling", "convert": "embed"}
    async with driven(VllmEngine(settings(model, arguments=arguments)), SPEC) as one:
        assert one.spec.tasks == ("embed",)
        answers = [await one.ask(prompt, task="embed") for prompt in ([5, 6, 7], [5, 6, 7], [8, 9])]
        vectors = [answer.vector for answer in answers]
        assert [len(vector) for vector in vectors] == [64, 64, 64]
        assert vectors[0] == pytest.approx(vectors[1], abs=1e-6)
        assert vectors[0] != pytest.approx(vectors[2], abs=1e-3)
        assert math.hypot(*vectors[0]) == pytest.approx(1.0, abs=1e-5)
        assert answers[0].finished is not None
        assert (answers[0].finished.prompt_tokens, answers[0].finished.output_tokens) == (3, 0)
        assert (await one.ask([5], 1)).error is not None

        (core,) = children() - before
        os.kill(core, signal.SIGKILL)
        with pytest.raises(EngineError, match="died"):
            await one.until(lambda: False)
        with pytest.raises(EngineError, match="died"):
            await one.engine.check()
    assert children() <= before
