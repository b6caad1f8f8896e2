"""Routes that tokenize and detokenize with the tokenizer of the model, in the format of vLLM."""

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from pydantic import model_validator

from forebay.ingress.errors import invalid
from forebay.ingress.http.openapi import BODY_ERRORS, body_of, errors
from forebay.ingress.http.queries import kind_of
from forebay.ingress.openai.fields import CheckedBody
from forebay.ingress.openai.requests import ChatBody, TextBody
from forebay.ingress.openai.sampling import TokenIds
from forebay.ingress.served import ServedModels

CHARS_PER_TOKEN = 4  # decoding a token takes about as long as encoding this much text


class TokenizeChatBody(ChatBody):
    """Body of POST /tokenize with `messages`. Other fields of a chat are accepted; `model` is optional."""

    model: str = ""
    return_token_strs: bool | None = None


class TokenizeTextBody(TextBody):
    """Body of POST /tokenize with a `prompt`. Other fields of a completion are accepted; `model` is optional."""

    model: str = ""
    return_token_strs: bool | None = None

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        """Add to the JSON schema that there is one prompt, which may be empty."""
        super().describe(schema)
        kinds = schema["properties"]["prompt"]["anyOf"]
        one_prompt = [kind for kind in kinds if kind.get("items", {}).get("type") not in ("string", "array")]
        schema["properties"]["prompt"] = {
            "anyOf": [{key: kind[key] for key in kind if key not in ("minLength", "minItems")} for kind in one_prompt]
        }

    @model_validator(mode="after")
    def _check_prompt(self) -> "TokenizeTextBody":
        if isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int):
            raise invalid("prompt is a list of prompts; send one request per prompt", "prompt")
        return self


class DetokenizeBody(CheckedBody):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


BODIES = (TokenizeChatBody, TokenizeTextBody, DetokenizeBody)


def add_tokenization(app: FastAPI, models: ServedModels) -> None:
    """Add `POST /tokenize` and `POST /detokenize` to `app`."""
    front = models.front
    responses = errors(*BODY_ERRORS, 404)

    @app.post("/tokenize", openapi_extra=body_of(TokenizeChatBody, TokenizeTextBody), responses=responses)
    async def tokenize(request: Request) -> dict[str, Any]:
        """Return the tokens of a text, or of a chat after the chat template."""
        with front.bodies.reader() as reader:
            raw = await reader.read(request)
            await front.admission.turn()
            body: TokenizeChatBody | TokenizeTextBody
            if kind_of(raw) is ChatBody:
                body = front.parse(TokenizeChatBody, raw)
            else:
                body = front.parse(TokenizeTextBody, raw)
            ingress, name = await models.only(body.model)
            model = ingress.model
            token_ids = await ingress.tokenize(body, name)
        names = [model.tokenizer.id_to_token(one) for one in token_ids] if body.return_token_strs else None
        return {
            "count": len(token_ids),
            "max_model_len": model.context_tokens,
            "tokens": token_ids,
            "token_strs": names,
        }

    @app.post("/detokenize", openapi_extra=body_of(DetokenizeBody), responses=responses)
    async def detokenize(request: Request) -> dict[str, str]:
        """Return the text of tokens, including special tokens."""
        with front.bodies.reader() as reader:
            raw = await reader.read(request)
            await front.admission.turn()
            body = front.parse(DetokenizeBody, raw)
            ingress, name = await models.only(body.model or "")
            await ingress.resolve_adapter(name)
            model = ingress.model
            if body.tokens and (highest := max(body.tokens)) >= model.vocabulary_size:
                text = f"token id {highest} is not in the vocabulary; ids must be below {model.vocabulary_size}"
                raise invalid(text, "tokens")
            decode = partial(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
            return {"prompt": await ingress.tokenizer_pool.run(decode, CHARS_PER_TOKEN * len(body.tokens))}
