"""Engine profiles: the values of `--engine`, and the format of profile files. See docs/simulate.md.

A profile defines the step times of an engine and, optionally, its sizes.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from forebay.engine_model.timing import EngineTiming, LinearTiming, MockerTiming
from forebay.runtime.errors import ConfigError, prefixed
from forebay.runtime.files import read_toml
from forebay.simulate.field_descriptions import converted
from forebay.simulate.profiles.roofline import Assumptions, NumberFormats, kv_blocks, roofline
from forebay.simulate.profiles.sheets import Gpu, gpu_sheet, gpus_like, read_transformer
from forebay.simulate.tiers.settings import WorkerTiers

MOCKER = "mocker"
BLOCK_SIZE = 64
SIZE_MAX = 1 << 31
Size = Annotated[int, msgspec.Meta(ge=1, le=SIZE_MAX)]
Gpus = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]  # per worker


class EngineSizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of an engine. A size that the profile does not define is None."""

    block_size: Size | None = None  # tokens per KV block
    kv_blocks: Size | None = None
    max_num_seqs: Size | None = None  # maximum number of running sequences
    max_num_batched_tokens: Size | None = None  # maximum number of tokens per step
    gpus: Gpus | None = None


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    timing: EngineTiming
    sizes: EngineSizes = EngineSizes()
    name: str = MOCKER
    source: str = "Dynamo's mocker"  # description of where the values come from
    work_us: int = 0  # microseconds from the router's decision to the engine; 0 if not measured
    # Host memory and disk of a worker with this engine; None if the profile defines none.
    tiers: WorkerTiers | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    name: str = ""
    source: str = ""
    sizes: EngineSizes = EngineSizes()
    work_us: Annotated[int, msgspec.Meta(ge=0, le=60_000_000)] = 0
    tiers: WorkerTiers | None = None


class _Mocker(_File, frozen=True, kw_only=True, tag="mocker"):
    pass


class _Linear(_File, frozen=True, kw_only=True, tag="linear"):
    costs_us: LinearTiming


class _Roofline(_File, frozen=True, kw_only=True, tag="roofline"):
    model: str  # path of a config.json, relative to the profile's directory
    gpu: str | Gpu  # name of a built-in data sheet of a GPU, or a table with the fields of `Gpu`
    tensor_parallel: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1  # GPUs per engine
    # Number format of the weights; None uses the format that the model was published in.
    weights: Literal["bf16", "fp8", "int4"] | None = None
    kv_cache: Literal["bf16", "fp8"] = "bf16"
    assumed: Assumptions = Assumptions()  # efficiencies and overheads that no data sheet states


_KINDS: Any = _Mocker | _Linear | _Roofline


def load_profile(name: str) -> Profile:
    """Load an engine profile: the built-in one if `name` is its name, otherwise the profile file at this path.

    Raises ConfigError if there is no such file, or its profile is invalid.
    """
    if name == MOCKER:
        return Profile(timing=MockerTiming())
    path = Path(name)
    if not path.is_file():
        reason = f"unknown engine profile {name!r}; use {MOCKER!r} or the path of a profile file"
        if gpus := gpus_like(name):
            reason += f'. For the GPU {" or ".join(gpus)} write a profile with kind = "roofline" and a model: '
            reason += "see docs/simulate.md"
        raise ConfigError(reason)
    raw = read_toml(path)
    with prefixed(path):
        described: _Mocker | _Linear | _Roofline = converted(raw, _KINDS, "key")
        profile = _profile(described, path)
    return msgspec.structs.replace(
        profile,
        name=described.name or path.stem,
        source=described.source or profile.source,
        work_us=described.work_us,
        tiers=described.tiers,
    )


def write_linear(profile: Profile, notes: str) -> str:
    """Return the text of a profile file with linear timing. The file begins with `notes` as comments."""
    assert isinstance(profile.timing, LinearTiming)
    lines = [f"# {line}".rstrip() for line in notes.splitlines()]
    lines += ["", 'kind = "linear"', f"name = {_text(profile.name)}", f"source = {_text(profile.source)}"]
    if profile.work_us:
        lines += [f"work_us = {profile.work_us}"]
    tables = {"costs_us": profile.timing, "sizes": profile.sizes}
    for title, table in tables.items():
        lines += ["", f"[{title}]"]
        for field in table.__struct_fields__:
            value = getattr(table, field)
            if value is not None:
                lines.append(f"{field} = {value!r}")
    return "\n".join([*lines, ""])


def _profile(described: _Mocker | _Linear | _Roofline, path: Path) -> Profile:
    match described:
        case _Mocker():
            return Profile(timing=MockerTiming(), sizes=described.sizes)
        case _Linear():
            return Profile(timing=described.costs_us, sizes=described.sizes, source=str(path))
        case _Roofline():
            return _from_sheets(described, path)


def _from_sheets(described: _Roofline, path: Path) -> Profile:
    model = read_transformer(path.parent / described.model)
    gpu = gpu_sheet(described.gpu) if isinstance(described.gpu, str) else described.gpu
    numbers = NumberFormats(weights=described.weights or ("fp8" if model.fp8 else "bf16"), kv_cache=described.kv_cache)
    shared = (model, gpu, numbers, described.tensor_parallel, described.assumed)
    sizes = described.sizes
    block_size = sizes.block_size or BLOCK_SIZE
    sizes = msgspec.structs.replace(
        sizes,
        block_size=block_size,
        kv_blocks=sizes.kv_blocks or kv_blocks(*shared, block_size),
        gpus=described.tensor_parallel if sizes.gpus is None else sizes.gpus,
    )
    return Profile(timing=roofline(*shared), sizes=sizes, source=gpu.source or "GPU data sheet in the profile")


def _text(value: str) -> str:
    """Return a TOML string; every JSON string is one."""
    return msgspec.json.encode(value).decode()
