"""Choice of the engine from the options of a command."""

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import msgspec

from forebay.cli.common.plain_file import kind_of, read_plain_file
from forebay.cli.common.times import size
from forebay.cli.processes.engine_options import EngineOptions
from forebay.events.control import Role
from forebay.events.names import unknown_name
from forebay.ingress.model import DEFAULT_MODEL
from forebay.processes.engines import EngineChoice
from forebay.processes.model_source import directory_of, find_model
from forebay.processes.names import adapters, names
from forebay.runtime.errors import ConfigError, install_command, prefixed
from forebay.simulate.field_descriptions import converted
from forebay.simulate.profiles.profile import MOCKER, load_profile
from forebay.workers.adapter_cache import CHUNK_BYTES, RANK_MAX, AdapterCache, base_names, is_uri
from forebay.workers.engine import EngineRefused
from forebay.workers.engines.adapters import ADAPTERS, ENGINES, MOCK
from forebay.workers.engines.encode import load_encoder
from forebay.workers.engines.settings import LORA_SLOTS, EngineSettings
from forebay.workers.kv_tiers.settings import TierSettings
from forebay.workers.kv_transfer.own_address import address_towards, own_address
from forebay.workers.service import load_service

MOCK_ONLY = {"speedup": "runs at its own speed", "engine_profile": "runs at its own speed"}
OWN_KV_TRANSFER = "configures KV transfer in --engine-args"
KV_OPTIONS = ("kv_bytes_per_token",)
DISAGGREGATED = ("prefill", "decode")
TIERED = (MOCK, "vllm", "sglang")  # engines that can offload KV to tiers
SHARING = ("vllm", "sglang")  # engines that report KV events of storage that their own connectors share
REACHED = (MOCK, "vllm")  # engines whose worker reports an address from which other workers fetch KV
SAME_OPTIONS = (  # fields of `EngineSettings` of the same name
    *("block_size", "kv_blocks", "max_num_seqs", "max_num_batched_tokens", "dp_size", "allow_tokenizer_mismatch"),
)


class MockArguments(msgspec.Struct, frozen=True):
    """Arguments of the mock engine in `--engine-args`.

    `kv_checksum`: whether to verify checksums of received KV. `kv_lease_s`: how long KV is kept that no decode worker
    fetches. `max_loras`: number of adapters that an engine has at a time. `lora_load_s`: seconds to load one.
    """

    kv_checksum: bool = False
    kv_lease_s: Annotated[float, msgspec.Meta(ge=0.1, le=3_600.0)] = 30.0
    max_loras: Annotated[int, msgspec.Meta(ge=1, le=1_024)] = LORA_SLOTS
    lora_load_s: Annotated[float, msgspec.Meta(ge=0.0, le=3_600.0)] = 0.0


def choose_engine(options: EngineOptions) -> EngineChoice:
    """Return the selected engine. Sizes that are None are left to it. Raises ConfigError if an option is invalid."""
    kv = {name: value for name in KV_OPTIONS if (value := getattr(options, name)) is not None}
    _require_engine(options.engine, options.model)
    _require_own(options.engine, {name: getattr(options, name) for name in MOCK_ONLY} | kv)
    if options.role not in get_args(Role):
        raise ConfigError(f"--role: {unknown_name('role', options.role, get_args(Role))}")
    if options.speedup is not None and not (math.isfinite(options.speedup) and options.speedup > 0):
        raise ConfigError(f"--speedup must be a positive number, not {options.speedup}")
    with prefixed("--engine-profile"):
        profile = load_profile(options.engine_profile or MOCKER)
    is_real = options.engine != MOCK
    if options.kv_store_name and options.engine not in SHARING:
        raise ConfigError(f"--kv-store-name requires --engine {' or '.join(SHARING)}, got {options.engine}")
    directory, called = find_model(options.model, options.revision, options.model_name, weights=is_real)
    loras = names("--lora", options.lora)
    arguments = {} if options.engine_args is None else _arguments(options.engine_args)
    cached = AdapterCache(
        options.lora_cache,
        bytes_max=size("--lora-cache-size", options.lora_cache_size, CHUNK_BYTES),
        bases=base_names(called, directory),
        rank_max=int(arguments.get("max_lora_rank") or RANK_MAX),
    )
    directories = _directories(loras, cached) if is_real or any(map(is_uri, loras)) else {}
    with prefixed("--engine-args"):
        mock = MockArguments() if is_real else converted(arguments, MockArguments, "argument")
    settings = EngineSettings(
        model=directory or DEFAULT_MODEL,
        model_name=called,
        role=cast(Role, options.role),
        loras=directories if is_real else {},
        kv_store_name=options.kv_store_name or "",
        start_s=options.engine_start_s,
        arguments=arguments if is_real else {},
        kv_checksum=mock.kv_checksum,
        kv_lease_s=mock.kv_lease_s,
        max_loras=mock.max_loras,
        lora_load_s=mock.lora_load_s,
        **{name: getattr(options, name) for name in SAME_OPTIONS},
        **kv,
    )
    if options.engine not in ENGINES:
        load = load_encoder if options.role == "encode" else load_service
        load(options.engine)  # here, because no event loop runs yet, and the code of users may start one
    return EngineChoice(
        engine=options.engine,
        settings=settings,
        loras=adapters(tuple(directories) or loras, called),
        speedup=options.speedup or 1.0,
        profile=profile,
        adapters=cached,
    )


def _require_engine(engine: str, model: str | None) -> None:
    if engine not in ENGINES and ":" not in engine:
        raise ConfigError(f"--engine: {unknown_name('engine', engine, (*ENGINES, 'FILE.py:Class'))}")
    if engine in ADAPTERS and model is None:
        raise ConfigError(f"the {engine} engine requires --model, a model directory with weights or ORG/NAME")
    for package in ADAPTERS[engine].packages if engine in ADAPTERS else ():
        if find_spec(package) is None:
            raise ConfigError(
                f"the {engine} engine requires the package {package}; install it with: {install_command(engine)}"
                " (docs/install.md lists tested versions and requirements)"
            )


def _require_own(engine: str, given: Mapping[str, object]) -> None:
    """Raise ConfigError if an option is given that the selected engine does not support."""
    for name in [name for name, value in given.items() if value is not None]:
        flag = f"--{name.replace('_', '-')}"
        if engine != MOCK:
            raise ConfigError(f"{flag} requires --engine mock: {engine} {MOCK_ONLY.get(name, OWN_KV_TRANSFER)}")


def tiered(choice: EngineChoice, tiers: TierSettings | None) -> EngineChoice:
    """Return the engine choice with KV tiers. Raises ConfigError if the engine has none."""
    if tiers is None:
        return choice
    if choice.engine not in TIERED:
        raise ConfigError(f"KV tiers require --engine {' or '.join(TIERED)}, got {choice.label}")
    if choice.settings.role == "encode":
        raise ConfigError("--role encode: an encode worker has no KV, so remove the options of KV tiers")
    if choice.settings.kv_store_name and tiers.store:
        raise ConfigError(
            "--kv-store-name names the storage of the engine's own connector; --kv-tier store names itself"
        )
    return choice.with_settings(tiers=tiers)


def reached_at(choice: EngineChoice, kv_host: str | None, kafka: str) -> EngineChoice:
    """Return the engine choice with the address from which other workers fetch KV of this engine.

    A `kv_host` of None selects the local address of connections to the bootstrap servers `kafka`: loopback if Kafka
    runs on this machine, otherwise an address in the network that the machines share. Raises ConfigError if the
    address is invalid, or other workers cannot fetch KV from this engine.
    """
    settings = choice.settings
    disaggregated = settings.role in DISAGGREGATED
    if kv_host is not None and not (disaggregated and choice.engine in REACHED):
        raise ConfigError(f"--kv-host requires --role {' or '.join(DISAGGREGATED)} and --engine {' or '.join(REACHED)}")
    if kv_host is None and not disaggregated:
        return choice
    try:
        if kv_host is not None:
            return choice.with_settings(kv_host=own_address(kv_host))
        return choice.with_settings(near_host=address_towards(kafka.split(",")))
    except ValueError as error:
        option = f"--kafka {kafka}" if kv_host is None else f"--kv-host {kv_host}"
        raise ConfigError(f"{option}: {error}") from None


def _directories(loras: Sequence[str], cached: AdapterCache) -> dict[str, Path]:
    """Parse NAME=DIR, NAME=URI and NAME=ORG/NAME values into adapter directories by name.

    An adapter at a URI stays in the cache until this process ends.
    """
    found: dict[str, Path] = {}
    for text in loras:
        name, equals, directory = text.partition("=")
        if not (name and equals and directory):
            raise ConfigError(f"--lora {text}: expected NAME=DIR, the name and the directory of the adapter")
        if name in found:
            raise ConfigError(f"--lora {text}: the name {name} appears twice")
        if not is_uri(directory):
            found[name] = directory_of(directory, f"--lora {text}", weights=True)
            continue
        try:
            found[name] = cached.fetch_now(directory).directory
        except EngineRefused as refusal:
            raise ConfigError(f"--lora {text}: {refusal}") from refusal
    return found


def _arguments(text: str) -> Mapping[str, Any]:
    """Read engine arguments from a file, or decode them if `text` is a JSON object."""
    if text.lstrip().startswith("{"):
        with prefixed("--engine-args"):
            raw = msgspec.json.decode(text)
        source = "--engine-args"
    else:
        raw, source = read_plain_file(Path(text), "file of arguments"), text
    if not isinstance(raw, dict) or not all(isinstance(name, str) for name in raw):
        what = "a mapping with other keys" if isinstance(raw, dict) else kind_of(raw)
        raise ConfigError(f"{source}: expected a mapping of argument names to values, got {what}")
    return raw
