"""SGLang that does not start or dies: a clear error each time, and no process left."""

import asyncio
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from forebay.ingress.model import Model
from forebay.processes.engines import tokenizer_probes
from forebay.workers.engine import EngineError
from forebay.workers.engines.engine_process import EngineProcess
from tests.engines.driven import driven
from tests.harness.processes import descendants
from tests.sglang.sglang_settings import ARGUMENTS, SPEC, sglang_engine


def children(title: bytes = b"") -> set[int]:
    """Return the descendants of this process whose command line contains a text, without Python's own helpers."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid())}
    return {pid for pid, line in lines.items() if title in line and b"resource_tracker" not in line}


async def refused(engine: EngineProcess) -> str:
    before = children()
    with pytest.raises(EngineError) as caught:
        async with driven(engine, SPEC):
            pass
    assert children() <= before
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def test_a_tokenizer_that_the_ingress_does_not_have(model: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "qwen"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    # The class brings its own pre-tokenizer, which SGLang replaces by that of tokenizer.json, so these probes agree.
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "Qwen2Tokenizer"}))
    probes = (*tokenizer_probes(Model(directory)), ("hello world", False, (360, 358)))
    error = await refused(sglang_engine(directory, tokenizer_probes=probes))
    assert f"the tokenizer of SGLang differs from {directory / 'tokenizer.json'}: 'hello world' has 2 tokens" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"no_such_argument": 1}, "rejects these arguments: .*no_such_argument"),
        ({"enable_deterministic_inference": True}, "attention backends are supported for deterministic inference"),
    ],
)
async def test_arguments_that_sglang_rejects(model: Path, arguments: dict[str, object], message: str) -> None:
    assert re.search(message, await refused(sglang_engine(model, arguments=ARGUMENTS | arguments)))


@pytest.mark.parametrize("process", ["scheduler", "detokenizer"])
async def test_the_death_of_a_process_ends_the_engine(model: Path, process: str) -> None:
    before = children()
    async with driven(sglang_engine(model), SPEC) as one:
        answer = one.submit(one.item([5, 6], 900))
        await one.until(lambda: answer.tokens)
        (pid,) = children(f"sglang::{process}".encode())
        checking = asyncio.create_task(one.engine.check())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="SGLang died"):
            await one.until(lambda: False)
        await asyncio.gather(checking, return_exceptions=True)
        assert not answer.over
    assert children() <= before
