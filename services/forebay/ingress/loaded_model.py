"""A model whose tokenizer is loaded: turns request bodies into requests for the log, and output into responses."""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from forebay.events.rendering import RENDERER_VERSION
from forebay.events.requests import RequestSubmitted
from forebay.ingress.bodies import AnyBody
from forebay.ingress.caller import ANONYMOUS, Caller
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.group import GroupClient
from forebay.ingress.media.tokens import MediaRef
from forebay.ingress.model import Model
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.nvext import RoutingHeaders, routing_headers
from forebay.ingress.openai.requests import ChatBody, TextBody
from forebay.ingress.parsers.selection import NONE, ParserFactory
from forebay.ingress.prepare import PreparedRequest, Preparer, Target, TokenizedPrompt
from forebay.ingress.response_fold import ResponseFold, fold_of
from forebay.runtime.errors import ConfigError


class LoadedModel:
    """A model of the ingress, with its tokenizer and parsers. Raises ConfigError if a parser does not fit the model.

    `card` is the digest of the model card; empty for a model from a directory.
    """

    def __init__(self, group: GroupClient, model: Model, card: str = "") -> None:
        settings = group.settings
        self.group = group
        self._run, self._fetch = group.front.tokenizer_pool.run, group.front.fetcher.fetch
        self.model = model
        self.parsers = ParserFactory(model, settings.tool_call_parser, settings.reasoning_parser)
        self._parsers = {(self.parsers.tool_name, self.parsers.reasoning_name): self.parsers}
        self._preparer = Preparer(model, self.parsers, settings, card)

    async def prepare(
        self,
        body: AnyBody,
        headers: Collection[tuple[str, str]],
        name: str = "",
        caller: Caller = ANONYMOUS,
        *,
        is_patient: bool = False,
    ) -> list[PreparedRequest]:
        """Turn a body into requests for the log: tokenize its prompts or inputs, and fetch their media.

        The result has one request per choice (`n` for the first prompt, then `n` for the next one) or per input.

        Args:
            headers: HTTP headers, or headers of the Kafka record.
            name: name of the model or of its adapter, if it differs from the name in the body.
            caller: who sent the request.
            is_patient: whether to wait if the tokenizer queue is full, instead of raising ApiError 503.

        Raises ApiError if the request is invalid or cannot be served.
        """
        lora_name = await self.group.adapters.resolve(name or body.model)
        completion, caller = body.completion, caller.with_details(body.end_user, headers)
        try:
            prompts, prepared = await self._prepare(completion, headers, lora_name, caller, is_patient=is_patient)
        except ApiError as error:
            raise body.renamed(error) from None
        return self._preparer.rendered(body, completion, prompts, prepared)

    async def _prepare(
        self,
        body: ChatBody | TextBody | EmbeddingBody,
        headers: Iterable[tuple[str, str]],
        lora_name: str,
        caller: Caller,
        *,
        is_patient: bool,
    ) -> tuple[list[TokenizedPrompt], list[PreparedRequest]]:
        steps = self._preparer
        if isinstance(body, EmbeddingBody):
            body.require_dimensions(self.model)
        routing = caller.routing(steps.routing(body.nvext, self._routing_headers(headers)))
        prepared: list[PreparedRequest] = []
        if isinstance(body, EmbeddingBody):
            target = Target(lora_name, routing, await self._block_size(), caller)
            chars = sum(len(text) for text in body.inputs if isinstance(text, str))
            work = partial(steps.tokenize_inputs, body.inputs)
            for index, token_ids in enumerate(await self._run(work, chars, is_patient=is_patient)):
                await asyncio.sleep(0)  # thousands of inputs must not block other requests
                prepared.append(steps.embed(body, index, token_ids, target))
            return [], prepared
        refs = steps.media_refs(body)
        prompts = await self._tokenize(body, refs, is_patient=is_patient)
        fetched = await self._fetch(refs, self.model.media)  # only after the text was validated
        target = Target(lora_name, routing, await self._block_size(), caller)
        for number, prompt in enumerate(prompts):
            if number:
                await asyncio.sleep(0)  # many prompts must not block other requests
            prepared += steps.choices(body, steps.complete(body, prompt, refs, fetched, target))
        return prompts, prepared

    async def prepare_call(
        self, name: str, payload: bytes, headers: Collection[tuple[str, str]], caller: Caller
    ) -> PreparedRequest:
        """Turn the call of an endpoint into a request for the log. Raises ApiError as `Preparer.call`."""
        caller = caller.with_details("", headers)
        routing = caller.routing(self._preparer.routing(None, self._routing_headers(headers)))
        return self._preparer.call(name, payload, Target("", routing, await self._block_size(), caller))

    async def tokenize(self, body: ChatBody | TextBody, name: str) -> list[int]:
        """Return the token ids of a chat, or of the only prompt of a text completion, for a model or adapter.

        Raises ApiError if the name is unknown, or the body is invalid, too long for the context, or has images or
        videos.
        """
        await self.group.adapters.resolve(name)
        if refs := self._preparer.media_refs(body):
            text = "images and videos cannot be tokenized; leave them out"
            raise invalid(text, "messages", "unsupported_parameter")
        (prompt,) = await self._tokenize(body, refs)
        return prompt.token_ids

    def fold(self, first: RequestSubmitted) -> ResponseFold:
        """Return the empty response to a request, given its first part on the log.

        Raises ApiError if a later version of forebay submitted the request, or a parser is unusable.
        """
        rendering = first.rendering
        assert rendering is not None, "the first part of a response has its rendering"
        if rendering.version > RENDERER_VERSION:
            text = f"a later version of forebay submitted the request {first.request_id}; update this ingress"
            raise ApiError(501, "renderer_too_old", text)
        names = rendering.tool_parser, rendering.reasoning_parser
        try:
            parsers = self._parsers.get(names) or ParserFactory(self.model, names[0] or NONE, names[1] or NONE)
        except ConfigError as error:
            raise ApiError(501, "parser_unusable", f"the request {first.request_id}: {error}") from error
        self._parsers[names] = parsers
        return fold_of(first, rendering, self.model, parsers)

    async def _tokenize(
        self, body: ChatBody | TextBody, refs: Sequence[MediaRef], *, is_patient: bool = False
    ) -> list[TokenizedPrompt]:
        steps, run = self._preparer, partial(self._run, is_patient=is_patient)
        body_chars = body.size_bytes - sum(len(ref.url) for ref in refs) if isinstance(body, ChatBody) else 0
        rendered = await run(partial(steps.render, body), body_chars)
        chars = sum(len(one) for one in rendered if isinstance(one, str))
        return await run(partial(steps.tokenize, body, rendered), chars)

    def _routing_headers(self, headers: Iterable[tuple[str, str]]) -> RoutingHeaders:
        found = routing_headers(headers)
        if not self.group.settings.routing_hints:
            for name in found:
                self.group.metrics.headers_ignored.labels(name).inc()
        return found

    async def _block_size(self) -> int:
        group = self.group
        return group.settings.block_size or await group.pools.block_size(group.settings.model_name)
