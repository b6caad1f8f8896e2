"""Prompts of queries, and the block hashes by which the index knows them."""

from collections import OrderedDict
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from forebay import runtime
from forebay.core.block_hashes import extend_chain, hash_seed, sequence_hashes
from forebay.events.base import pack_u32, pack_u64
from forebay.events.requests import RouteQueried
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.model import InvalidModel, Model
from forebay.ingress.model_cards import open_model
from forebay.ingress.openai.fields import CheckedBody, optional
from forebay.ingress.openai.sampling import PROMPT_TOKENS_MAX, TokenIds
from forebay.ingress.tokenizer import encode_prompt
from forebay.transport.models import ModelStore

SEED_BYTES = 8
LOADED_MAX = 8  # a tokenizer takes 5 to 60 MB of memory
BlockHash = Annotated[int, Field(ge=0, lt=1 << 64)]
BlockHashes = Annotated[list[BlockHash], Field(fail_fast=True, min_length=1, max_length=PROMPT_TOKENS_MAX)]


class PromptBody(CheckedBody):
    """A prompt, as exactly one of `text`, `token_ids` and `block_hashes`."""

    text: Annotated[str, Field(min_length=1)] | None = optional("Text, tokenized by the model card of the workers.")
    token_ids: Annotated[TokenIds, Field(min_length=1)] | None = optional("Token ids.")
    block_hashes: BlockHashes | None = optional("Hash of each full block, independent of the blocks before it.")
    add_special_tokens: bool = Field(default=True, description="Whether `text` gets special tokens around it.")
    lora_name: str = Field(default="", description="LoRA adapter; empty for the base model.")
    cache_salt: str = Field(default="", description="Salt of the hashes of `text` or `token_ids`.")

    @model_validator(mode="after")
    def _check(self) -> "PromptBody":
        given = [name for name in ("text", "token_ids", "block_hashes") if getattr(self, name) is not None]
        if len(given) != 1:
            raise invalid(f"got {' and '.join(given) or 'no prompt'}; give one of text, token_ids, block_hashes")
        return self

    def query(self, model: str, token_ids: list[int], block_size: int) -> RouteQueried:
        """Return the route query for `block_hashes`, or without these for `token_ids`."""
        if self.block_hashes is None:
            tokens, seed = len(token_ids), hash_seed(self.lora_name, self.cache_salt)
            hashes = sequence_hashes(pack_u32(token_ids), block_size, seed)
        else:
            tokens = len(self.block_hashes) * block_size
            hashes = pack_u64(extend_chain(None, self.block_hashes))
        return RouteQueried(
            request_id="indexer",
            model=model,
            prompt_tokens=tokens,
            sequence_hashes=hashes,
            reply_slot=0,
            tie_seed=runtime.random_int(SEED_BYTES),
            lora_name=self.lora_name,
        )


class Tokenizers:
    """Tokenizers by the digest of the model card. Their files are in `folder`."""

    def __init__(self, store: ModelStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._models: OrderedDict[str, Model] = OrderedDict()  # the model that was used last comes last

    async def encode(self, card: str, body: PromptBody) -> list[int]:
        """Return the token ids of a body. Raises ApiError (422) for a text without a usable card, or LogError."""
        if body.text is None:
            return body.token_ids or []
        if card not in self._store.cards:
            text = "the workers have stored no model card, so text cannot be tokenized; send token_ids"
            raise ApiError(422, "no_model_card", text, "text")
        model = self._models.get(card)
        if model is None:
            try:
                model = await open_model(self._store, card, self._folder)
            except InvalidModel as error:
                raise ApiError(422, "model_card_unusable", f"{error}; send token_ids", "text") from error
        self._models[card] = model
        self._models.move_to_end(card)
        if len(self._models) > LOADED_MAX:
            self._models.popitem(last=False)
        return await runtime.offload(encode_prompt, model, body.text, "text", "text", special=body.add_special_tokens)
