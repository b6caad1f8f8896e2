"""Bodies of POST /tokenize and /detokenize, with the names of vLLM.

A body to tokenize may have every field of a completion, so a client can count the tokens of a request by sending its
body to /tokenize.
"""

from typing import Any

from pydantic import model_validator

from forebay.ingress.errors import invalid
from forebay.ingress.openai.fields import CheckedBody
from forebay.ingress.openai.requests import ChatBody, TextBody
from forebay.ingress.openai.sampling import TokenIds


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
