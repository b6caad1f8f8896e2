"""Topic `usage`: the ledger, a chain of records per control partition with what each tenant has used.

Each record follows from the journal and the records of `requests` and `progress` that it covers, so anyone can derive
it again while the log still has them. It names the hash of the previous record. Readers ignore a record that does not
continue the chain. Replays do not use this topic.
"""

from typing import Annotated

import msgspec

from forebay.events.base import Count, Event, Part
from forebay.events.positions import JournalPosition
from forebay.events.privacy import DROPPED, KEPT, MODEL, TENANT

HASH_DIGITS = 64
NO_HASH = "0" * HASH_DIGITS  # of a record that is not sealed yet

RecordHash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=HASH_DIGITS), KEPT]


class UsageEntry(Part, frozen=True, kw_only=True):
    """Sums over the requests of one API key to one model that ended in the same hour.

    Attributes:
        hour_us: beginning of the hour on the owner's clock, as Unix time in microseconds.
        tenant: tenant that owns the API key; empty for requests without a tenant.
        key_id: public id of the API key.
        model: model of the requests.
        requests: requests that ended. The owner had accepted each of them.
        incomplete: the part of `requests` that failed, or was aborted or cancelled before the client had the complete
            response.
        prompt_tokens: tokens of the prompts that a worker computed. Choices that share a prompt count the prompt once.
        cached_tokens: the part of `prompt_tokens` that the worker found in a cache, as it reported.
        output_tokens: output tokens that the clients got.
        queue_us: microseconds between submission and the first routing.
        prefill_us: microseconds between the first routing and the first token, including encoding, transfers and
            retries.
        decode_us: microseconds between the first token and the end.
    """

    hour_us: Count
    tenant: Annotated[str, TENANT] = ""
    key_id: Annotated[str, DROPPED] = ""
    model: Annotated[str, MODEL] = ""
    requests: Count = 0
    incomplete: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    output_tokens: Count = 0
    queue_us: Count = 0
    prefill_us: Count = 0
    decode_us: Count = 0


class UsageRecorded(Event, tag="usage.recorded", frozen=True, kw_only=True):
    """Usage of the requests whose end is in a part of the journal. Each request is part of one record.

    A record continues the chain if `number` is the next one, `previous` is the hash of the chain's last record, and
    `hash` fits its content. If two writers append records with the same number, readers ignore the second one.

    Attributes:
        number: number of the record in its chain, from 0.
        begin: where a reader must begin to know the requests in flight at `from_offset`.
        from_offset: first journal offset that the record covers.
        until_offset: offset after the last journal record that the record covers.
        entries: usage, ordered by hour, tenant, key and model.
        previous: hash of the previous record; empty for the first one.
        hash: SHA-256, as hex, of the bytes of this record up to this value. Always the last field.
    """

    number: Count
    begin: JournalPosition
    from_offset: Count
    until_offset: Count
    entries: tuple[UsageEntry, ...]
    previous: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$", max_length=HASH_DIGITS), KEPT] = ""
    hash: RecordHash


UsageRecord = UsageRecorded
