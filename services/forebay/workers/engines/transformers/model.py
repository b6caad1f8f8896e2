"""Generate text and embeddings with a Hugging Face transformers model. This module imports torch."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers.generation import BaseStreamer, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from forebay.events.base import U64_MASK
from forebay.events.requests import Sampling
from forebay.workers.engine import EngineError
from forebay.workers.engines.model_directory import one_line

GREEDY_BELOW = 1e-5  # temperature; the same threshold as vLLM
LOAD_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError, SafetensorError)


class _TokenStreamer(BaseStreamer):  # type: ignore[misc]  # transformers has no types here
    """Passes every output token on as soon as it is generated."""

    def __init__(self, emit: Callable[[int], None]) -> None:
        self._emit = emit
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Skip the prompt, which `generate` passes first, and emit each later token."""
        if not self._is_prompt:
            self._emit(int(value.reshape(-1)[0]))
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing: the return of `generate` marks the end."""


class _Cancellation(StoppingCriteria):  # type: ignore[misc]  # transformers has no types here
    """Ends the generation when the request is cancelled."""

    def __init__(self, cancelled: threading.Event) -> None:
        self._cancelled = cancelled

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return a boolean tensor of shape [1]."""
        return torch.tensor([self._cancelled.is_set()], device=input_ids.device)


class TransformersModel:
    """One causal language model on one device. Call its methods one at a time, because torch has one global seed.

    Attributes:
        vocabulary_size: number of token ids that the model knows.
        context_tokens: maximum prompt and output tokens of a request.
    """

    def __init__(self, directory: Path, arguments: Mapping[str, Any]) -> None:
        options = {"dtype": torch.float32, **arguments}
        threads, device = options.pop("threads", None), options.pop("device", "cpu")
        transformers.utils.logging.disable_progress_bar()
        try:
            if threads is not None:
                torch.set_num_threads(threads)
            self._model, report = transformers.AutoModelForCausalLM.from_pretrained(
                directory, **{**options, "local_files_only": True, "output_loading_info": True}
            )
            self._model.to(device).eval()
        except LOAD_ERRORS as error:
            raise EngineError(f"{directory}: transformers cannot load the model: {one_line(error)}") from error
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])
            raise EngineError(f"{directory}: {len(missing)} weights are missing, the first is {missing[0]}")
        config = self._model.config.get_text_config(decoder=True)
        self.vocabulary_size: int = config.vocab_size
        self.context_tokens: int = getattr(config, "max_position_embeddings", None) or (1 << 31) - 1
        ends = self._model.generation_config.eos_token_id
        self._eos_tokens = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        # `generate` would fill in the sampling defaults of the model directory; only the request's parameters count.
        self._model.generation_config = GenerationConfig()

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, emit: Callable[[int], None], cancelled: threading.Event
    ) -> bool:
        """Generate output tokens until a stop token, until `sampling.max_tokens`, or until the request is cancelled.

        Args:
            prompt: token ids, at least one.
            emit: receives each output token, on this thread.
            cancelled: ends the generation after the current token.

        Returns:
            Whether the last token is a stop token.

        Raises:
            ValueError: a sampling parameter is out of range.
        """
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_tokens)
        options: dict[str, Any] = {"eos_token_id": sorted(stops) or None, "max_new_tokens": sampling.max_tokens}
        options |= {"min_new_tokens": sampling.min_tokens, "repetition_penalty": float(sampling.repetition_penalty)}
        if sampling.logit_bias:
            options["sequence_bias"] = {(one.token_id,): float(one.bias) for one in sampling.logit_bias}
        if not abs(sampling.temperature) < GREEDY_BELOW:
            options |= {"do_sample": True, "temperature": float(sampling.temperature), "top_k": sampling.top_k}
            options |= {"top_p": float(sampling.top_p), "min_p": sampling.min_p or None}
        if sampling.seed is None:
            torch.seed()
        else:
            torch.manual_seed(sampling.seed & U64_MASK)
        ids = torch.tensor([list(prompt)], device=self._model.device)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(pad_token_id=0, **options),
            stopping_criteria=StoppingCriteriaList([_Cancellation(cancelled)]),
            streamer=_TokenStreamer(emit),
        )
        return int(output[0, -1]) in stops

    def embed(self, prompt: Sequence[int]) -> bytes:
        """Return the embedding of a prompt: the mean of its last hidden states, normalized to length 1.

        Args:
            prompt: token ids, at least one.

        Returns:
            The vector, packed as little-endian float32.
        """
        with torch.inference_mode():
            states = self._model.base_model(torch.tensor([list(prompt)], device=self._model.device)).last_hidden_state
            unit = torch.nn.functional.normalize(states[0].float().mean(dim=0), dim=0)
        packed: bytes = unit.cpu().numpy().astype("<f4").tobytes()
        return packed
