"""Engine options shared by several commands. They are separate from the engines, which --help does not load."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, get_args

from forebay.cli.common.options import Option
from forebay.cli.processes.options import LorasOption, ModelNameOption, ModelOption, RevisionOption
from forebay.events.control import Role
from forebay.workers.engines.adapters import ENGINES, MOCK
from forebay.workers.engines.settings import START_S

ENGINE_HELP = (
    f"Engine: {', '.join(ENGINES)}, or FILE.py:Class, a service, or an encoder for --role encode. Experimental: sglang"
    " and tensorrt-llm."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    PANEL: ClassVar = "Engine"

    engine: Annotated[str, Option(help=ENGINE_HELP)] = MOCK
    model: ModelOption = None
    revision: RevisionOption = None
    model_name: ModelNameOption = ""
    engine_args: Annotated[
        str | None,
        Option(
            help="Engine arguments: a YAML or JSON file, or a JSON object. Mock engine: kv_checksum and kv_lease_s."
        ),
    ] = None
    engine_start_s: Annotated[
        float, Option(min=1.0, help="Maximum seconds for a real engine to start. A large model may need more.")
    ] = START_S
    allow_tokenizer_mismatch: Annotated[
        bool, Option("--allow-tokenizer-mismatch", help="Serve although the engine's tokenizer is not the model's.")
    ] = False
    role: Annotated[str, Option(help=f"Worker role: {', '.join(get_args(Role))}.")] = "aggregated"
    speedup: Annotated[float | None, Option(help="Speed relative to the modelled GPU. Mock engine only.")] = None
    engine_profile: Annotated[
        str | None, Option(help="Engine profile of the mock engine: a file, or mocker. Default: mocker.")
    ] = None
    block_size: Annotated[int | None, Option(min=1, help="Tokens per KV block. Mock default: 64.")] = None
    kv_blocks: Annotated[int | None, Option(min=1, help="KV blocks per rank. Mock default: 16384.")] = None
    max_num_seqs: Annotated[int | None, Option(min=1, help="Sequences per rank. Mock default: 256.")] = None
    max_num_batched_tokens: Annotated[
        int | None, Option(min=1, help="Maximum tokens per engine step. Mock default: 8192.")
    ] = None
    dp_size: Annotated[int, Option(min=1, max=1024, help="Data-parallel ranks per worker.")] = 1
    lora: LorasOption = None
    lora_cache: Annotated[
        Path | None,
        Option(help="Directory in which adapters at URIs are cached. Default: ~/.cache/forebay/adapters."),
    ] = None
    lora_cache_size: Annotated[str, Option(help="Maximum size of the cached adapters, such as 500MB.")] = "32GB"
    kv_bytes_per_token: Annotated[
        int | None, Option(min=1, max=1 << 20, help="Bytes of KV per token. Mock engine only. Default: 256.")
    ] = None
    kv_store_name: Annotated[
        str | None,
        Option(
            help="Name of the storage that the engine's own connector shares with workers of the same name. vLLM and"
            " SGLang only."
        ),
    ] = None
