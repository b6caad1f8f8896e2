"""A transformers model whose keys and values lie in numbered blocks: the `Runner` of the transformers engine.

Theory of operation. transformers hands new keys and values of a layer to its cache, and attends to what the cache gives
back. This cache writes them into blocks of one big tensor a layer, and gathers a sequence's blocks for reading, so
sequences share the blocks of a common prefix. Sequences of different lengths decode together, padded on the left.
(The continuous batching of transformers itself shares prefixes, too, but does not tell which blocks it holds.)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import transformers
from safetensors import SafetensorError
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from forebay.events.requests import Sampling
from forebay.workers.engine import EngineError
from forebay.workers.engines.transformers.sampling import TokenSampler
from forebay.workers.engines.transformers.scheduler import Row

PROBE_TOKENS = 24  # enough to fill a chunk, and another one
TOLERANCE = 0.02  # of the largest logit; float32 differs by less than 1e-5, bfloat16 by some 1e-3
LOAD_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError, SafetensorError)


Method = TypeVar("Method", bound=Callable[..., Any])


def _inferring(method: Method) -> Method:
    """Nothing is kept for a gradient."""
    return cast(Method, torch.inference_mode()(method))


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a forward pass writes keys and values, and what it reads: slots, `rows` times `length` of them."""

    write: torch.Tensor
    read: torch.Tensor
    rows: int
    length: int
    new: int


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types here
    """The blocks of one layer: [slots, heads, head_dim] each for keys and values."""

    is_sliding = False  # the mask may slide; nothing is thrown away

    def __init__(self, slots: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        # Zeros, because what is masked still counts when it is not a number. Memory comes as it is touched.
        self.keys = keys.new_zeros((slots, keys.shape[1], keys.shape[3]))
        self.values = values.new_zeros((slots, values.shape[1], values.shape[3]))
        self.is_initialized = True
        self.plan: _Plan | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing left to do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [rows, heads, new, head_dim]; what is read is [rows, heads, length, head_dim]."""
        assert self.plan is not None
        return self._through(self.keys, key_states, self.plan), self._through(self.values, value_states, self.plan)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """What `update` returns, from its beginning."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens before the new ones."""
        return 0 if self.plan is None else self.plan.length - self.plan.new

    def get_max_length(self) -> int:
        """None."""
        return -1

    @staticmethod
    def _through(held: torch.Tensor, new: torch.Tensor, plan: _Plan) -> torch.Tensor:
        held.index_copy_(0, plan.write, new.transpose(1, 2).reshape(-1, *held.shape[1:]))
        if plan.length == plan.new:
            return new
        return held.index_select(0, plan.read).view(plan.rows, plan.length, *held.shape[1:]).transpose(1, 2)


class TransformersModel:
    """Runs one model on one device. Everything is called on one thread, under `torch.inference_mode`."""

    def __init__(self, directory: Path, arguments: Mapping[str, Any]) -> None:
        given = dict(arguments)
        threads, device = given.pop("threads", None), given.pop("device", "cpu")
        transformers.utils.logging.disable_progress_bar()
        try:
            if threads is not None:
                torch.set_num_threads(threads)
            self._model, report = transformers.AutoModelForCausalLM.from_pretrained(
                directory, **{"dtype": torch.float32, **given, "local_files_only": True, "output_loading_info": True}
            )
            self._model.to(device).eval()
        except LOAD_ERRORS as error:
            raise EngineError(f"{directory}: transformers cannot load it: {_line(error)}") from error
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])
            raise EngineError(f"{directory}: {len(missing)} weights are missing, the first is {missing[0]}")
        config = self._model.config.get_text_config(decoder=True)
        self._device = self._model.device
        self._known = frozenset(signature(self._model.forward).parameters)
        self.vocabulary_size: int = config.vocab_size
        self.context_tokens: int = getattr(config, "max_position_embeddings", None) or (1 << 31) - 1
        self._ends = _ends(self._model.generation_config.eos_token_id)
        self._block_size = 0
        self._cache = Cache(layers=[])

    @_inferring
    def probe(self) -> int:
        """Find out what the model caches: bytes a token. Raises EngineError for a model that keeps another state."""
        name = type(self._model).__name__
        cache = DynamicCache(config=self._model.config)
        kinds = {type(layer) for layer in cache.layers}
        if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
            raise EngineError(f"{name} keeps a state that is no KV cache: run it with --engine vllm")
        ids = torch.zeros((1, 1), dtype=torch.long, device=self._device)
        try:
            self._model(input_ids=ids, past_key_values=cache, use_cache=True)
            self._shapes = [(layer.keys, layer.values) for layer in cache.layers]
            return sum(part.nbytes for layer in self._shapes for part in layer)
        except LOAD_ERRORS as error:
            raise EngineError(f"{name} does not run: {_line(error)}") from error

    @_inferring
    def allocate(self, block_size: int, blocks: int) -> None:
        """Make room for so many blocks, and see that the model does with them what it does without.

        Raises EngineError when it does not, and when there is no room.
        """
        if blocks < 2:
            raise EngineError("the transformers engine needs at least 2 KV blocks")
        self._block_size = block_size
        try:
            self._cache = Cache(layers=[_Layer(block_size * blocks, *layer) for layer in self._shapes])
            self._require_agreement(blocks)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:  # torch's errors, out of memory among them
            name = type(self._model).__name__
            raise EngineError(f"{name} does not run on {blocks} blocks of {block_size}: {_line(error)}") from error

    def _require_agreement(self, blocks: int) -> None:
        """Logits of two sequences, computed in chunks and then together, are those of each computed alone."""
        tokens = min(PROBE_TOKENS, (blocks // 2) * self._block_size, self.context_tokens)
        places = list(range(self._blocks_of(tokens))), list(range(blocks - self._blocks_of(tokens), blocks))
        rows = []
        alone = []
        for sequence, length in enumerate((tokens, tokens // 2 + 1)):
            ids = [(7 * place + 13 * sequence) % self.vocabulary_size for place in range(length)]
            cut = length // 2
            if cut:
                self.prefill(ids[:cut], 0, places[sequence])
            if length - 1 > cut:
                self.prefill(ids[cut:-1], cut, places[sequence])
            rows.append(Row(ids[-1], length - 1, places[sequence]))
            whole = torch.tensor([ids], device=self._device)
            alone.append(self._model(input_ids=whole, use_cache=False).logits[0, -1].float())
        for found, expected in zip(self.decode(rows), alone, strict=True):
            error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
            if not error <= TOLERANCE:  # nor is it if it is no number
                name = type(self._model).__name__
                raise EngineError(f"{name} does not work with KV blocks (logits differ by {error:.2g}): use vllm")

    def prefill(self, tokens: Sequence[int], first: int, places: Sequence[int]) -> torch.Tensor:
        """The logits after the last token, [vocabulary]."""
        logits = self._run(self._model, tokens, first, places, logits_to_keep=1).logits
        return logits[0, -1].float()

    @_inferring
    def decode(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """The logits after each row's token, [vocabulary] each."""
        length = max(row.position for row in rows) + 1
        read = torch.zeros((len(rows), length), dtype=torch.long)
        mask = torch.zeros((len(rows), length), dtype=torch.long)
        for at, row in enumerate(rows):
            read[at, length - row.position - 1 :] = self._slots(row.places, row.position + 1)
            mask[at, length - row.position - 1 :] = 1
        plan = _Plan(read[:, -1].to(self._device), read.flatten().to(self._device), len(rows), length, 1)
        ids = torch.tensor([[row.token] for row in rows], device=self._device)
        positions = torch.tensor([[row.position] for row in rows], device=self._device)
        padded = None if len(rows) == 1 else mask.to(self._device)
        result = self._forward(self._model, plan, ids, positions, attention_mask=padded)
        return [row[-1].float() for row in result.logits]

    def hidden_sum(self, tokens: Sequence[int], first: int, places: Sequence[int]) -> torch.Tensor:
        """The sum of the last hidden states, [hidden]."""
        result = self._run(self._model.base_model, tokens, first, places)
        return result.last_hidden_state[0].float().sum(dim=0)

    def embedding(self, hidden_sum: torch.Tensor, tokens: int) -> bytes:
        """The mean at length 1, packed little-endian f32."""
        unit = torch.nn.functional.normalize(hidden_sum / tokens, dim=0)
        packed: bytes = unit.cpu().numpy().astype("<f4").tobytes()
        return packed

    def sampler(self, sampling: Sampling, prompt_tokens: int) -> TokenSampler:
        """Raises ValueError for what transformers does not take."""
        return TokenSampler(sampling, prompt_tokens, self.stop_tokens(sampling), self._device)

    def stop_tokens(self, sampling: Sampling) -> frozenset[int]:
        """The model's own ends, if they count, and the request's."""
        return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._ends)

    @_inferring
    def _run(self, model: Any, tokens: Sequence[int], first: int, places: Sequence[int], **options: Any) -> Any:
        """Compute the tokens of one sequence from position `first` on."""
        read = self._slots(places, first + len(tokens)).to(self._device)
        plan = _Plan(read[first:], read, 1, len(read), len(tokens))
        ids = torch.tensor([list(tokens)], device=self._device)
        positions = torch.arange(first, first + len(tokens), device=self._device)[None]
        return self._forward(model, plan, ids, positions, **options)

    def _forward(self, model: Any, plan: _Plan, ids: torch.Tensor, positions: torch.Tensor, **options: Any) -> Any:
        for layer in self._cache.layers:
            layer.plan = plan
        options["position_ids"] = positions
        known = {name: value for name, value in options.items() if name in self._known}
        return model(input_ids=ids, past_key_values=self._cache, use_cache=True, **known)

    def _slots(self, places: Sequence[int], tokens: int) -> torch.Tensor:
        """The slots of a sequence's first tokens."""
        begins = torch.tensor(places[: self._blocks_of(tokens)], dtype=torch.long)[:, None] * self._block_size
        return (begins + torch.arange(self._block_size)).flatten()[:tokens]

    def _blocks_of(self, tokens: int) -> int:
        return math.ceil(tokens / self._block_size)


def _ends(token: int | list[int] | None) -> frozenset[int]:
    if token is None:
        return frozenset()
    return frozenset(token) if isinstance(token, list) else frozenset([token])


def _line(error: BaseException) -> str:
    """What an error says, on one line that is no page."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}…"
