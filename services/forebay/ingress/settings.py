"""Settings of an ingress."""

from dataclasses import dataclass, field

from forebay.ingress.errors import Unusable
from forebay.ingress.http.body_limits import MEDIA_BYTES_MAX, TEXT_BYTES_MAX
from forebay.ingress.kafka_api.topics import require_patterns
from forebay.ingress.media.refs import PUBLIC_ONLY, MediaSettings
from forebay.ingress.openai.nvext import NAME_CHARS_MAX
from forebay.ingress.parsers.selection import AUTO


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """Settings of an ingress.

    Attributes:
        model_name: the model that the ingress serves.
        ingress_id: name of the process.
        block_size: tokens per KV block of the pool; None reads the value from the log.
        reply_slot: partition of `tokens` that the ingress reads.
        body_bytes_max: maximum bytes of a request body without its images and videos; larger bodies get 413.
        media_body_bytes_max: maximum bytes of a whole request body, if the model accepts images or videos.
        timeout_s: seconds for a whole request.
        max_tokens_default: output tokens of requests that set no limit.
        routing_hints: whether clients may set worker, priority, session or policy class. Otherwise such headers are
            ignored and counted, and such fields are rejected.
        loras: adapters that are always served as models, in addition to those that workers have loaded.
        admin_token: token of the admin API, empty for no admin API.
        tool_call_parser: `auto` (by the chat template), `none`, or the name of a parser.
        reasoning_parser: `auto`, `none`, or the name of a parser.
        media: where images and videos may be fetched from.
        reply_topics: patterns of full topic names that the Kafka API may respond to; `<namespace>.replies.*` if empty.
        incarnation: incarnation of the lease, which distinguishes processes with the same id; empty without a lease.
    """

    model_name: str
    ingress_id: str
    block_size: int | None = None
    reply_slot: int = 0
    body_bytes_max: int = TEXT_BYTES_MAX
    media_body_bytes_max: int = MEDIA_BYTES_MAX
    timeout_s: float = 600.0
    max_tokens_default: int = 256
    routing_hints: bool = False
    loras: tuple[str, ...] = ()
    admin_token: str = field(default="", repr=False)
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    media: MediaSettings = PUBLIC_ONLY
    reply_topics: tuple[str, ...] = ()
    incarnation: str = ""

    def __post_init__(self) -> None:
        require_patterns(self.reply_topics)
        names = (self.model_name, *self.loras)
        if len(set(names)) < len(names) or not all(0 < len(name) <= NAME_CHARS_MAX for name in names):
            text = f"names must be unique and have 1 to {NAME_CHARS_MAX} characters"
            raise Unusable(f"the model and its LoRA adapters ({', '.join(names)}): {text}")
