"""Parts of an ingress process that all models which it serves share."""

import asyncio

from forebay.ingress.admission import IngressAdmission
from forebay.ingress.api_keys import ApiKeys
from forebay.ingress.body_limits import VALUES_MAX, BodyLimits, BodyMemory
from forebay.ingress.drain import IngressDrain
from forebay.ingress.limits import LimitsOfKeys
from forebay.ingress.media.fetch import MediaFetcher
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import Model
from forebay.ingress.openai.fields import BodyT, parse
from forebay.ingress.settings import IngressSettings
from forebay.ingress.streams import ReplySlot, ReplySlots
from forebay.ingress.tokenizer import TokenizerPool
from forebay.transport.answers import AnswerStore
from forebay.transport.base import Log
from forebay.transport.keys import KeyBook
from forebay.transport.limits import LimitStore, MemoryLimits

BACKGROUND_MAX = 1_024  # responses whose clients have disconnected and that are rendered to the end, to be kept
CONTEXT_TOKENS_MAX = 2_000_000  # of models that are not known yet, for the number of values in a body


class Front:
    """Reply slot, limits, admission and drain of an ingress process.

    Attributes:
        answers: the kept answers.
        keys: the API keys, which another task keeps current.
        limits: the limits of the keys.
        in_background: number of responses that are rendered although their clients have disconnected.

    Args:
        reply_from: first offset of the reply slot to read.
        model: the only model of the process, None if requests name one of several.
        limit_store: counts for the limits of keys, by default in memory.
    """

    def __init__(
        self,
        log: Log,
        settings: IngressSettings,
        metrics: IngressMetrics,
        reply_from: int,
        model: Model | None = None,
        limit_store: LimitStore | None = None,
    ) -> None:
        self.log = log
        self.settings = settings
        self.metrics = metrics
        self.slot = ReplySlot(log, settings.reply_slot, reply_from, metrics.undecodable.inc, metrics.foreign.inc)
        self.slots = ReplySlots(log, self.slot)
        self.answers = AnswerStore(log)
        self.keys = ApiKeys(
            settings.api_keys,
            KeyBook(log),
            settings.key_file,
            admin_token=settings.admin_token,
            on_unusable=metrics.key_file_unusable.inc,
            is_required=settings.requires_key,
        )
        self.limits = LimitsOfKeys(limit_store or MemoryLimits(), settings.incarnation, metrics)
        self.in_background = 0
        self.drain = IngressDrain()
        self.admission = IngressAdmission(metrics)
        limits = BodyLimits(
            text_bytes_max=settings.body_bytes_max,
            media_bytes_max=settings.media_body_bytes_max,
            takes_media=model is None or bool(model.media.ids),
            values_max=VALUES_MAX + (CONTEXT_TOKENS_MAX if model is None else model.context_tokens),
        )
        self.bodies = BodyMemory(limits)
        self.tokenizer_pool = TokenizerPool()
        self.fetcher = MediaFetcher(settings.media)

    async def run(self) -> None:
        """Dispatch events of the reply slot, follow kept answers and read limits, until cancelled. Raises LogError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.slot.run())
                tasks.create_task(self.answers.run())
                tasks.create_task(self.limits.run())
        finally:
            self.slots.stop()
            await self.fetcher.close()
            self.tokenizer_pool.close()

    def parse(self, kind: type[BodyT], raw: bytes) -> BodyT:
        """Return a parsed body. Raises ApiError (400) for an invalid one, by the settings also for unknown fields."""
        return parse(kind, raw, ignores_unknown=self.settings.ignore_unknown_fields)
