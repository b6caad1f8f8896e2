"""Construction of engines and the specs of their workers.

A real engine runs in a process of its own, so the packages of the other engines need not be installed.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from forebay.engine_model.model import EngineConfig
from forebay.events.fleet import WorkerSpec
from forebay.ingress.errors import ApiError
from forebay.ingress.model import Model, word_token_ids
from forebay.runtime.errors import ConfigError, prefixed
from forebay.simulate.profiles.profile import MOCKER, Profile, load_profile
from forebay.workers.adapter_cache import AdapterCache
from forebay.workers.engine import Engine
from forebay.workers.engines.adapters import ADAPTERS, MOCK
from forebay.workers.engines.encode import EncodeEngine, Encoder, StandInEncoder, load_encoder
from forebay.workers.engines.engine_process import engine_process
from forebay.workers.engines.mock.engine import MockEngine, MockLoras
from forebay.workers.engines.mock.kv import KvSettings
from forebay.workers.engines.mock.outputs import OutputScripts
from forebay.workers.engines.service_engine import ServiceEngine
from forebay.workers.engines.settings import EngineSettings, TokenizerProbe, pool_of
from forebay.workers.kv_transfer.api import NIXL
from forebay.workers.kv_transfer.own_address import interface_of
from forebay.workers.service import load_service

MOCKER_PROFILE = load_profile(MOCKER)
WORDS_MAX = 512  # words of strings that a mock engine generates
PROBE_TEXTS = (
    "10 plus 25 is 35,  and 1234567 is 3.1e-10",
    "naïve 🙂👩‍👩‍👧 don't STOP",
    "缓存里有前缀。한국어 こんにちは",
    "def f(x):\n\tif x:\n\t\treturn  x+1\n\n",
)
PROBE_MESSAGES = ({"role": "user", "content": PROBE_TEXTS[0]}, {"role": "assistant", "content": PROBE_TEXTS[3]})
SPECIAL_TOKENS_MAX = 8  # of a probe
NOT_KNOWN = 1  # placeholder for a size that the engine reports after its start


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """Selected engine and its settings.

    Attributes:
        engine: One of `ENGINES`, or a user's service or encoder class as FILE.py:Class.
        settings: `model` is the default model directory if no model was named.
        speedup: Speed of a mock engine relative to the modelled GPU.
        profile: Step times and default sizes of a mock engine.
        adapters: Cache of the adapters that commands name by URIs.
    """

    engine: str
    settings: EngineSettings
    loras: tuple[str, ...] = ()
    speedup: float = 1.0
    profile: Profile = MOCKER_PROFILE
    adapters: AdapterCache = field(default_factory=AdapterCache, compare=False)

    @property
    def is_mock(self) -> bool:
        return self.engine == MOCK

    @property
    def label(self) -> str:
        """Name of the engine, or of the user's class."""
        return self.engine.rpartition(":")[2]

    @property
    def context_tokens(self) -> int | None:
        """Context length that the engine's own arguments set; None for that of the model directory."""
        adapter = ADAPTERS.get(self.engine)
        tokens = None if adapter is None else self.settings.arguments.get(adapter.context_argument)
        return tokens if isinstance(tokens, int) and tokens > 0 else None  # vLLM has -1 for a size that it chooses

    def with_settings(self, **changed: Any) -> "EngineChoice":
        return replace(self, settings=replace(self.settings, **changed))


def with_own_disk(choice: EngineChoice, worker_id: str) -> EngineChoice:
    """Return the engine choice with a subdirectory of its disk tier for one of several workers."""
    tiers = choice.settings.tiers
    if tiers is None or tiers.disk is None:
        return choice
    return choice.with_settings(tiers=replace(tiers, disk=tiers.disk / worker_id))


def built(
    choice: EngineChoice,
    worker_id: str,
    *,
    pool: str,
    taints: Sequence[str] = (),
    kv_events: bool = True,
) -> tuple[Engine, WorkerSpec]:
    """Build an engine without starting it, and the spec of its worker. Sizes that only a started engine knows are 1.

    Raises ConfigError if the user's service or encoder cannot be loaded.
    """
    settings = choice.settings
    spec = WorkerSpec(
        worker_id=worker_id,
        model=settings.model_name,
        pool=pool or pool_of(settings.role),
        engine=choice.label,
        block_size=settings.block_size or NOT_KNOWN,
        kv_blocks_total=settings.kv_blocks or NOT_KNOWN,
        max_num_seqs=settings.max_num_seqs or NOT_KNOWN,
        max_num_batched_tokens=settings.max_num_batched_tokens or NOT_KNOWN,
        dp_size=settings.dp_size,
        dp_start_rank=settings.dp_start_rank,
        taints=tuple(taints),
        loras=choice.loras,
        kv_events=kv_events,
        role=settings.role,
    )
    if settings.role == "encode" and choice.engine in ADAPTERS:
        if not (encoder := ADAPTERS[choice.engine].encoder):
            raise ConfigError(
                f"--role encode: the {choice.label} engine has no encoder; use --engine FILE.py:Class, an encoder of"
                f" your own, vllm, or {MOCK}, a stand-in"
            )
        return engine_process(*encoder, settings), spec
    if settings.role == "encode":
        return EncodeEngine(_encoder(choice), cache_bytes=settings.embedding_cache_bytes), spec
    if choice.is_mock:
        return _mock(choice, spec)
    if choice.engine in ADAPTERS:
        adapter = ADAPTERS[choice.engine]
        if (settings.model / "tokenizer.json").is_file():  # otherwise no ingress can use the model
            settings = replace(settings, tokenizer_probes=tokenizer_probes(Model(settings.model)))
        return engine_process(adapter.module, adapter.name, settings), spec
    service = load_service(choice.engine)
    if settings.role != "aggregated":
        raise ConfigError(
            f"--role {settings.role}: {choice.label} is a service, and services support only the role aggregated"
        )
    return ServiceEngine(service, settings), msgspec.structs.replace(spec, pool=pool or service.pool)


def tokenizer_probes(model: Model) -> tuple[TokenizerProbe, ...]:
    """Return texts that tokenizers often treat differently, with their token ids as the ingress computes them."""
    special = [text for _, text in sorted(model.token_bytes.special.items())[:SPECIAL_TOKENS_MAX]]
    texts = [(text, False) for text in (*PROBE_TEXTS, "10 a ".join(["", *special, ""]))]
    with suppress(ApiError):  # there is no chat template, or it rejects these messages
        texts.append((model.render(PROBE_MESSAGES), False))
    texts.append((PROBE_TEXTS[0], True))
    return tuple((text, is_prompt, tuple(model.encode(text, special=is_prompt))) for text, is_prompt in texts)


def _encoder(choice: EngineChoice) -> Encoder:
    if choice.is_mock:
        return StandInEncoder()
    encoder = load_encoder(choice.engine)
    try:
        return encoder()
    except Exception as error:  # the code of users may raise anything
        raise ConfigError(f"cannot create {choice.label}: {type(error).__name__}: {error}") from error


def _mock(choice: EngineChoice, spec: WorkerSpec) -> tuple[Engine, WorkerSpec]:
    settings, known = choice.settings, choice.profile.sizes
    sizes = {
        "block_size": settings.block_size or known.block_size,
        "kv_blocks_total": settings.kv_blocks or known.kv_blocks,
        "max_num_seqs": settings.max_num_seqs or known.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens or known.max_num_batched_tokens,
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    try:
        vocabulary, scripts = _output_of(settings.model)
        config = EngineConfig(vocabulary=vocabulary, timing=choice.profile.timing, **given)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    engine = MockEngine(
        config,
        dp_size=settings.dp_size,
        dp_start_rank=settings.dp_start_rank,
        speedup=choice.speedup,
        kv=KvSettings(
            connector=mock_connector(),
            bytes_per_token=settings.kv_bytes_per_token,
            checksum=settings.kv_checksum,
            lease_s=settings.kv_lease_s,
            interface=_kv_interface(settings),
            speedup=choice.speedup,
        ),
        loras=MockLoras(settings.max_loras, settings.lora_load_s),
        scripts=scripts,
        tiers=settings.tiers,
    )
    return engine, msgspec.structs.replace(spec, **{name: getattr(config, name) for name in sizes})


def mock_connector() -> Literal["nixl", "modelled"]:
    """Return how mock engines transfer KV: by NIXL if it is installed, otherwise in modelled time."""
    return NIXL if find_spec("nixl_cu12") else "modelled"


def _kv_interface(settings: EngineSettings) -> str:
    """Return the network interface over which NIXL transfers the KV of a mock engine; empty to let UCX select one."""
    if settings.kv_host is None or "UCX_NET_DEVICES" in os.environ:  # noqa: TID251 - read by UCX
        return ""  # UCX selects the interface, or uses UCX_NET_DEVICES
    with prefixed("--kv-host"):
        return interface_of(settings.kv_host)


@cache
def _output_of(directory: Path) -> tuple[tuple[int, ...], OutputScripts]:
    """Return the words that a mock engine generates, and the scripts of its other output, for a model directory."""
    model = Model(directory)
    vocabulary = word_token_ids(model.tokenizer)
    words = [word for one in vocabulary[:WORDS_MAX] if (word := model.decode([one]).strip())]
    decode = partial(model.tokenizer.decode, skip_special_tokens=False)
    return vocabulary, OutputScripts(model.encode, decode, words or ["word"])
