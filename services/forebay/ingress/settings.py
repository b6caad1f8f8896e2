"""Settings of an ingress."""

import re
from dataclasses import dataclass, field

from forebay.ingress.body_limits import MEDIA_BYTES_MAX, TEXT_BYTES_MAX
from forebay.ingress.key_file import KeyFile
from forebay.ingress.media.tokens import PUBLIC_ONLY, MediaSettings
from forebay.ingress.openai.nvext import NAME_CHARS_MAX
from forebay.ingress.parsers.selection import AUTO
from forebay.runtime.errors import ConfigError

REPLY_TOPICS = re.compile(r"[A-Za-z0-9._*?-]{1,249}")  # names of Kafka, * and ?
ALL_MODELS = "all models"  # no name of a model, because it has a space


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """Settings of an ingress.

    Attributes:
        model_name: the model that the ingress serves, or `ALL_MODELS`.
        block_size: tokens per KV block of the pool; None if the ingress reads the value from the log.
        reply_slot: partition of `tokens` on which the ingress reads the output of its requests.
        body_bytes_max: maximum bytes of a request body without its images and videos; larger bodies get 413.
        media_body_bytes_max: maximum bytes of a whole request body, if the model accepts images or videos.
        timeout_s: maximum seconds for a whole request.
        routing_hints: whether clients may set routing hints: worker, priority, session or policy class. If false, the
            ingress ignores and counts such headers, and rejects bodies with such fields.
        ignore_unknown_fields: whether unknown fields of request bodies have no effect. If false, they are rejected.
        loras: LoRA adapters that are always served as models, in addition to adapters that workers have loaded.
        api_keys: keys without a tenant, in addition to those of `key_file`.
        key_file: file of further keys, also of tenants. The ingress reads it again when it changes.
        require_key: whether clients need a key although `api_keys` and `key_file` are empty. Only then do requests over
            the Kafka API need a signature.
        cors_origins: origins whose web pages may read responses, from `allowed_origins`.
        admin_token: token that the admin API requires; empty for no admin API.
        admin_port: port of the loopback address that serves the admin API; None for the port of the other routes.
        tool_call_parser: `auto` (by the model card), `none`, or the name of a parser; so is `reasoning_parser`.
        reply_topics: patterns of full topic names for responses of the Kafka API; empty for `<namespace>.replies.*`.
        incarnation: distinguishes processes with the same `ingress_id`, and is the value of its lease.
        has_lease: whether an owner notices the end of this process, and then cancels its requests.
    """

    model_name: str
    ingress_id: str
    block_size: int | None = None
    reply_slot: int = 0
    body_bytes_max: int = TEXT_BYTES_MAX
    media_body_bytes_max: int = MEDIA_BYTES_MAX
    timeout_s: float = 600.0
    routing_hints: bool = False
    ignore_unknown_fields: bool = False
    loras: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    key_file: KeyFile | None = None
    require_key: bool = False
    cors_origins: frozenset[str] = frozenset()
    admin_token: str = field(default="", repr=False)
    admin_port: int | None = None
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    media: MediaSettings = PUBLIC_ONLY
    reply_topics: tuple[str, ...] = ()
    incarnation: str = ""
    has_lease: bool = True

    def __post_init__(self) -> None:
        for pattern in self.reply_topics:
            if not REPLY_TOPICS.fullmatch(pattern):
                raise ConfigError(
                    f"invalid --reply-topic {pattern!r}; a pattern has 1 to 249 letters, digits, dots, "
                    "dashes, underscores, * for any characters and ? for one"
                )
        if self.admin_token in (*self.api_keys, *(self.key_file.plain if self.key_file else ())):
            raise ConfigError("the admin token is also an API key; choose two different values")
        names = (self.model_name, *self.loras)
        if len(set(names)) < len(names) or not all(0 < len(name) <= NAME_CHARS_MAX for name in names):
            text = f"names must be unique and have 1 to {NAME_CHARS_MAX} characters"
            raise ConfigError(f"the model and its LoRA adapters ({', '.join(names)}): {text}")

    @property
    def requires_key(self) -> bool:
        """Whether a client must send an API key to use the model."""
        return self.require_key or bool(self.api_keys) or self.key_file is not None
