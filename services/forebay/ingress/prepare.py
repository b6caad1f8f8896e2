"""Prepare a request: turn a validated body into an immutable request for the log. Performs no I/O.

Theory of operation. `LoadedModel.prepare` calls the methods of `Preparer` in the order of this module. Between them it
does the work that needs I/O or threads: it tokenizes in a pool, fetches media, and reads the block size.

    routing -> media_refs -> render -> tokenize -> complete -> choices -> rendered -> submissions or query

An embedding request takes `tokenize_inputs`, then `embed` for each input; a call takes `call`. Clock readings and
random numbers are arguments, so equal arguments give an equal event, unless a chat template contains today's date.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import hash_seed, mm_hashes, sequence_hashes
from forebay.events.base import U32_BYTES, U64_BYTES, pack_u32
from forebay.events.media import Media
from forebay.events.rendering import Rendering
from forebay.events.request_ids import part_ids
from forebay.events.requests import (
    NO_HINTS,
    RequestSubmitted,
    RouteQueried,
    RouterOverride,
    RoutingHints,
    Sampling,
    Task,
)
from forebay.ingress.caller import ANONYMOUS, Caller
from forebay.ingress.chat_template import RENDERED_CHARS_MAX
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.media.tokens import ExpandedPrompt, FetchedMedia, MediaRef
from forebay.ingress.model import Model
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.nvext import Nvext, RoutedBody, RoutingHeaders, reject_hints, routing_of
from forebay.ingress.openai.requests import ChatBody, CompletionBody, TextBody
from forebay.ingress.openai.sampling import PROMPT_TOKENS_MAX, SEED_MAX, sampling_of
from forebay.ingress.parsers.selection import ParserFactory
from forebay.ingress.settings import IngressSettings
from forebay.ingress.tokenizer import encode_prompt

EMBEDDING = Sampling(max_tokens=1, temperature=0.0)  # no tokens are generated, so sampling has no effect
CALL = Sampling(max_tokens=(1 << 31) - 1, temperature=0.0)  # an endpoint ends its output itself
PAYLOAD_BYTES_MAX = 256 << 10  # brokers limit a record to 1 MiB by default


class Target(msgspec.Struct, frozen=True):
    """Values outside of the prompt that a prepared request depends on. `lora_name` is empty for the base model."""

    lora_name: str
    routing: RoutingHints
    block_size: int
    caller: Caller = ANONYMOUS


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """Tokens of a prompt, before its media placeholders are expanded.

    Attributes:
        token_ids: token ids, with one placeholder per image or video.
        is_open: whether the response begins inside of reasoning.
        echo: text with which the response begins; empty unless the client requested the text of its prompt.
    """

    token_ids: list[int]
    is_open: bool = False
    echo: str = ""


class PreparedRequest(msgspec.Struct, frozen=True):
    """A validated request for the log, still without its id and reply slot.

    Attributes:
        token_ids: token ids of the prompt, packed as little-endian u32.
        sequence_hashes: hash of each full block of the prompt, packed as little-endian u64. The hashes depend on the
            adapter and on `cache_namespace`.
        cache_namespace: salt of the block hashes. Requests share KV blocks only if their salts are equal.
        kv_pin_s: seconds for which the worker keeps the KV of the prompt.
        rendering: how the output becomes the response, still without its time; None for later parts of a response.
    """

    model: str
    token_ids: bytes
    sequence_hashes: bytes
    prompt_tokens: int
    lora_name: str
    cache_namespace: str
    media: tuple[Media, ...]
    sampling: Sampling
    routing: RoutingHints
    timeout_us: int
    task: Task = "generate"
    kv_pin_s: int = 0
    rendering: Rendering | None = None
    caller: Caller = ANONYMOUS
    shares_prompt: bool = False
    payload: str = ""

    def submission(
        self,
        request_id: str,
        *,
        reply_slot: int,
        reply_from: int,
        nonce: int,
        at_us: int,
        ingress_id: str,
        incarnation: str = "",
        patient: bool = False,
    ) -> RequestSubmitted:
        """Return the event that submits the request, with these values and `tie_seed`, a hash of `nonce`."""
        return RequestSubmitted(
            request_id=request_id,
            model=self.model,
            token_ids=self.token_ids,
            sequence_hashes=self.sequence_hashes,
            reply_slot=reply_slot,
            timeout_us=self.timeout_us,
            tie_seed=tie_seed_of(nonce),
            sampling=self.sampling,
            nonce=nonce,
            reply_from=reply_from,
            ingress_id=ingress_id,
            at_us=at_us,
            lora_name=self.lora_name,
            cache_namespace=self.cache_namespace,
            routing=self.routing,
            task=self.task,
            media=self.media,
            ingress_incarnation=incarnation,
            patient=patient,
            kv_pin_s=self.kv_pin_s,
            rendering=self.rendering,
            tenant=self.caller.tenant,
            key_id=self.caller.key.key_id,
            weight=self.caller.key.weight,
            end_user=self.caller.end_user,
            traceparent=self.caller.traceparent,
            shares_prompt=self.shares_prompt,
            payload=self.payload,
        )

    def query(self, request_id: str, *, reply_slot: int, nonce: int, at_us: int) -> RouteQueried:
        """Return the event of a route query. Equal queries may select different workers, as their nonces differ."""
        return RouteQueried(
            request_id=request_id,
            model=self.model,
            prompt_tokens=self.prompt_tokens,
            sequence_hashes=self.sequence_hashes,
            reply_slot=reply_slot,
            tie_seed=tie_seed_of(nonce),
            at_us=at_us,
            lora_name=self.lora_name,
            routing=self.routing,
        )


def reserved_tokens(prepared: Sequence[PreparedRequest]) -> tuple[int, int]:
    """Return the prompt tokens and the maximum output tokens of a request, which count for the limits of its key."""
    rendering = prepared[0].rendering
    assert rendering is not None, "the first part of a response has its rendering"
    return rendering.prompt_tokens, sum(part.sampling.max_tokens for part in prepared if part.task == "generate")


def tie_seed_of(nonce: int) -> int:
    """Return the seed of a request for tie-breaking and sampling.

    It depends only on the random nonce and reveals nothing about the request, so anonymised recordings keep it.
    """
    return xxh3_64_intdigest(nonce.to_bytes(U64_BYTES, "little"))


def part_nonce(nonce: int, index: int) -> int:
    """Return the nonce of a part of a response, from the nonce of the first part and the position of this one."""
    return xxh3_64_intdigest(nonce.to_bytes(U64_BYTES, "little"), index) if index else nonce


def submissions(
    request_id: str, prepared: Sequence[PreparedRequest], *, nonce: int, created_s: int, **facts: Any
) -> list[RequestSubmitted]:
    """Return the events that submit all parts of a request.

    Args:
        nonce: nonce of the first part.
        created_s: time of creation in the response, as Unix time in seconds.
        facts: the other arguments of `PreparedRequest.submission`.
    """
    ids = part_ids(request_id, len(prepared))
    first, *others = (
        part.submission(ids[index], nonce=part_nonce(nonce, index), **facts) for index, part in enumerate(prepared)
    )
    assert first.rendering is not None
    rendering = msgspec.structs.replace(first.rendering, created_s=created_s)
    return [msgspec.structs.replace(first, rendering=rendering), *others]


@dataclass(frozen=True, slots=True)
class Preparer:
    """Turns request bodies into prepared requests, in several methods. Each raises ApiError for an invalid request.

    `card` is the digest of the model card; empty for a model from a directory.
    """

    model: Model
    parsers: ParserFactory
    settings: IngressSettings
    card: str = ""

    def routing(self, nvext: Nvext | None, headers: RoutingHeaders) -> RoutingHints:
        """Return the routing hints in the body (`nvext`) and the headers of a request.

        Without `--routing-hints` there are none: hints in the body raise ApiError, and the headers are ignored.
        """
        if self.settings.routing_hints:
            return routing_of(nvext, headers)
        reject_hints(nvext)
        return NO_HINTS

    def media_refs(self, body: ChatBody | TextBody) -> list[MediaRef]:
        """Return the images and videos of a request, in order. Raises ApiError if the model does not support them."""
        refs = body.media() if isinstance(body, ChatBody) else []
        self.model.media.require(refs)
        return refs

    def render(self, body: ChatBody | TextBody) -> list[str | list[int]]:
        """Return the prompts as text, for a chat by the chat template. If the client sent token ids, return these."""
        if isinstance(body, TextBody):
            return body.prompts
        arguments = body.template_arguments(self.model.template_source)
        chars_max = max(RENDERED_CHARS_MAX, 4 * self.settings.body_bytes_max)
        is_open, continues = body.add_generation_prompt is not False, bool(body.continue_final_message)
        return [
            self.model.render(
                body.chat(), body.choice.plain(), arguments, chars_max, is_open=is_open, continues=continues
            )
        ]

    def tokenize(self, body: ChatBody | TextBody, rendered: Sequence[str | list[int]]) -> list[TokenizedPrompt]:
        """Return the tokens of each prompt.

        Raises ApiError if a prompt does not fit into the context, the choices have too many prompt tokens together, or
        the tool calls could not be parsed.
        """
        prompts = [self._tokenize(body, one) for one in rendered]
        total = sum(len(prompt.token_ids) for prompt in prompts) * body.choices_per_prompt
        if total > PROMPT_TOKENS_MAX and (len(prompts) > 1 or body.choices_per_prompt > 1):
            text = f"the choices have {total:,} prompt tokens together; the limit is {PROMPT_TOKENS_MAX:,}"
            raise invalid(text, "n", "context_length_exceeded")
        return prompts

    def _tokenize(self, body: ChatBody | TextBody, rendered: str | list[int]) -> TokenizedPrompt:
        if isinstance(body, ChatBody):
            assert isinstance(rendered, str), "a chat is rendered to text"
            self.parsers.require(body.choice)
            token_ids = encode_prompt(self.model, rendered, "prompt", "messages")
            prompt = TokenizedPrompt(token_ids, is_open=self.parsers.is_open(rendered))
        elif isinstance(rendered, str):
            special = body.add_special_tokens is not False
            token_ids = encode_prompt(self.model, rendered, "prompt", "prompt", special=special)
            prompt = TokenizedPrompt(token_ids, echo=rendered if body.echo else "")
        else:
            prompt = TokenizedPrompt(rendered, echo=self.model.decode(rendered) if body.echo else "")
        if len(prompt.token_ids) > self.model.context_tokens:  # reject the request before its media are fetched
            self._output_tokens_max(body, len(prompt.token_ids))
        return prompt

    def complete(
        self,
        body: ChatBody | TextBody,
        prompt: TokenizedPrompt,
        refs: Sequence[MediaRef],
        fetched: Sequence[FetchedMedia],
        target: Target,
    ) -> PreparedRequest:
        expanded = ExpandedPrompt(prompt.token_ids)
        if self.model.media.ids:
            expanded = self.model.media.expand(prompt.token_ids, refs, fetched)
        max_tokens = self._output_tokens_max(body, len(expanded.token_ids))
        sampling = sampling_of(body, max_tokens, self.model)
        return self._prepared(body, expanded, sampling, target, "prompt")

    def choices(self, body: ChatBody | TextBody, prepared: PreparedRequest) -> list[PreparedRequest]:
        """Return one request per choice of a prompt. As in vLLM, the seed of a choice is the seed plus its position."""
        found, sampling = [prepared], prepared.sampling
        for number in range(1, body.choices_per_prompt):
            if (seed := prepared.sampling.seed) is not None:
                sampling = msgspec.structs.replace(sampling, seed=(seed + number) & SEED_MAX)
            found.append(msgspec.structs.replace(prepared, sampling=sampling, shares_prompt=True))
        return found

    def rendered(
        self,
        body: RoutedBody,
        completion: ChatBody | TextBody | EmbeddingBody,
        prompts: Sequence[TokenizedPrompt],
        prepared: Sequence[PreparedRequest],
    ) -> list[PreparedRequest]:
        """Return all parts of a request, the first one with what the response to the body needs besides the output."""
        first, *others = prepared
        fields: dict[str, Any] = {}
        if isinstance(completion, ChatBody):
            fields = {
                "is_chat": True,
                "is_open": prompts[0].is_open,
                "tools": completion.choice.encoded(),
                "tool_parser": self.parsers.tool_name,
                "reasoning_parser": self.parsers.reasoning_name,
            }
        if not isinstance(completion, EmbeddingBody):
            fields |= {
                "choices_per_prompt": completion.choices_per_prompt,
                "stream": bool(completion.stream),
                "stops": tuple(completion.stop_strings),
                "special": completion.skip_special_tokens is False,
                "echo": tuple(prompt.echo for prompt in prompts) if any(prompt.echo for prompt in prompts) else (),
            }
        per_prompt = fields.get("choices_per_prompt", 1)
        rendering = Rendering(
            api=body.endpoint,
            model=body.model,
            created_s=0,
            card=self.card,
            parts=len(prepared),
            prompt_tokens=sum(one.prompt_tokens for one in prepared[::per_prompt]),
            options=body.options,
            input=body.conversation,
            **fields,
        )
        return [msgspec.structs.replace(first, rendering=rendering), *others]

    def tokenize_inputs(self, inputs: Sequence[str | list[int]]) -> list[list[int]]:
        return [
            one if isinstance(one, list) else encode_prompt(self.model, one, f"input[{index}]", "input", special=True)
            for index, one in enumerate(inputs)
        ]

    def embed(self, body: EmbeddingBody, index: int, token_ids: list[int], target: Target) -> PreparedRequest:
        context = self.model.context_tokens
        if len(token_ids) > context:
            text = f"input[{index}] has {len(token_ids)} tokens, more than the context of {context} tokens; shorten it"
            raise invalid(text, "input", "context_length_exceeded")
        return self._prepared(body, ExpandedPrompt(token_ids), EMBEDDING, target, "input", task="embed")

    def call(self, name: str, payload: bytes, target: Target) -> PreparedRequest:
        """Return the call of an endpoint. If `token_ids` of the payload has tokens, the call is routed by them.

        Otherwise workers take turns. Raises ApiError if the payload is too large or no JSON, or has invalid tokens.
        """
        if len(payload) > PAYLOAD_BYTES_MAX:
            text = f"the payload has {len(payload):,} bytes; the limit is {PAYLOAD_BYTES_MAX:,}"
            raise ApiError(413, "body_too_large", text)
        try:
            value = msgspec.json.decode(payload)
            token_ids = pack_u32(value.get("token_ids") or ()) if isinstance(value, dict) else b""
        except (msgspec.MsgspecError, RecursionError) as error:
            raise invalid(f"the payload is not valid JSON: {error}", code="invalid_json") from error
        except (TypeError, ValueError, OverflowError) as error:
            text = f"token_ids must be a list of integers from 0 to 4,294,967,295: {error}"
            raise invalid(text, "token_ids") from error
        routing = msgspec.structs.replace(target.routing, endpoint=name)
        if not token_ids:
            routing = msgspec.structs.replace(routing, override=RouterOverride(mode="round-robin"))
        namespace, prompt_tokens = target.caller.namespace(""), len(token_ids) // U32_BYTES
        model = self.settings.model_name
        return PreparedRequest(
            model=model,
            token_ids=token_ids,
            sequence_hashes=sequence_hashes(token_ids, target.block_size, hash_seed("", namespace)),
            prompt_tokens=prompt_tokens,
            lora_name="",
            cache_namespace=namespace,
            media=(),
            sampling=CALL,
            routing=routing,
            timeout_us=max(1, round(self.settings.timeout_s * 1e6)),
            task="call",
            rendering=Rendering(
                api="endpoints", model=model, created_s=0, card=self.card, prompt_tokens=prompt_tokens, stream=True
            ),
            caller=target.caller,
            payload=payload.decode(),
        )

    def _output_tokens_max(self, body: CompletionBody, prompt_tokens: int) -> int:
        """Return the maximum number of output tokens, at most what the prompt leaves of the context, as in vLLM.

        Raises ApiError if the prompt leaves nothing, or the request wants more than the whole context.
        """
        context = self.model.context_tokens
        left = context - prompt_tokens
        if left < 1:
            text = f"the prompt has {prompt_tokens} tokens, so the context of {context} has no room for a response"
            where = "messages" if isinstance(body, ChatBody) else "prompt"
            raise invalid(f"{text}; shorten the prompt", where, "context_length_exceeded")
        if (wanted := body.tokens_max or 0) > context:
            text = f"max_tokens {wanted} exceeds the context of {context} tokens; request fewer tokens"
            raise invalid(text, "max_tokens", "context_length_exceeded")
        return min(wanted or self.model.generation.max_new_tokens or left, left)

    def _prepared(
        self,
        body: RoutedBody,
        prompt: ExpandedPrompt,
        sampling: Sampling,
        target: Target,
        where: str,
        task: Task = "generate",
    ) -> PreparedRequest:
        """Return the request for a prompt. Raises ApiError for an empty prompt and for unknown token ids."""
        token_ids, vocabulary = prompt.token_ids, self.model.vocabulary_size
        if not token_ids:
            raise invalid(f"the {where} is empty", where, "empty_prompt")
        if (highest := max(token_ids)) >= vocabulary:
            raise invalid(f"token id {highest} is not in the vocabulary; ids must be below {vocabulary}", where)
        packed, size = pack_u32(token_ids), target.block_size
        namespace = target.caller.namespace(body.cache_namespace)
        seed = hash_seed(target.lora_name, namespace)
        return PreparedRequest(
            model=self.settings.model_name,
            token_ids=packed,
            sequence_hashes=sequence_hashes(packed, size, seed, mm_hashes(prompt.media, size)),
            prompt_tokens=len(token_ids),
            lora_name=target.lora_name,
            cache_namespace=namespace,
            media=prompt.media,
            sampling=sampling,
            routing=target.routing,
            timeout_us=max(1, round(self.settings.timeout_s * 1e6)),
            task=task,
            kv_pin_s=0 if task == "embed" else body.kv_pin_s,
            caller=target.caller,
        )
