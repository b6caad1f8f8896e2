"""Topic `keys`: API keys of tenants, with their limits. It has hashes of the keys, and never a key itself.

The key of a record is the hash of the API key, so compaction keeps the newest event of each one. A revoked key keeps
its record, so that a client learns why it is refused, until `forebay forget` writes a record without a value. Replays
do not use this topic.
"""

from typing import Annotated

import msgspec

from forebay.events.base import Count, Event
from forebay.events.privacy import DROPPED, TENANT, SystemName

KEY_ID_DIGITS = 12
TENANT_WEIGHT_MAX = 1_000
LISTED_MAX = 64  # models or queue classes of one key

Weight = Annotated[int, msgspec.Meta(ge=1, le=TENANT_WEIGHT_MAX)]
Tenant = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$"), TENANT]
KeyHash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64), DROPPED]


class KeySet(Event, tag="key.set", frozen=True, kw_only=True):
    """A new API key, or the changed properties of one. Every limit of 0 is off.

    Attributes:
        key_hash: SHA-256 of the API key as hex; of the bytes of `public_key` if the key signs records.
        tenant: name of the tenant that owns the key.
        models: models that the key may use, as clients name them; empty for all.
        requests_per_minute: maximum requests in any 60 s, at all ingresses together.
        tokens_per_minute: maximum tokens in any 60 s: those of the prompt and of the output.
        in_flight: maximum requests at the same time.
        tokens_per_day: maximum tokens per day in UTC.
        tokens_per_month: maximum tokens per month in UTC.
        weight: share of the tenant in the router's queue, relative to the weights of other tenants.
        queue_classes: queue classes in which a request may wait. The first one is the default. A client may name
            another one of them. Empty for the default class of the pool.
        cache_namespace: keys with the same namespace share cached blocks; empty for the name of the tenant.
        public_key: Ed25519 key with which the tenant signs records of the Kafka API, as 64 hex digits; empty for none.
        created_us: Unix time of the creation in microseconds.
        expires_us: Unix time from which on the key is refused, in microseconds; 0 for never.
        revoked_us: Unix time of the revocation in microseconds; 0 if the key is not revoked.
    """

    key_hash: KeyHash
    tenant: Tenant
    models: Annotated[tuple[SystemName, ...], msgspec.Meta(max_length=LISTED_MAX)] = ()
    requests_per_minute: Count = 0
    tokens_per_minute: Count = 0
    in_flight: Count = 0
    tokens_per_day: Count = 0
    tokens_per_month: Count = 0
    weight: Weight = 1
    queue_classes: Annotated[tuple[SystemName, ...], msgspec.Meta(max_length=LISTED_MAX)] = ()
    cache_namespace: Annotated[str, msgspec.Meta(max_length=128), TENANT] = ""
    public_key: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$", max_length=64), DROPPED] = ""
    created_us: int = 0
    expires_us: int = 0
    revoked_us: int = 0

    @property
    def key(self) -> bytes:
        """Key of the record."""
        return self.key_hash.encode()

    @property
    def key_id(self) -> str:
        """Public name of the key: the first hex digits of its hash."""
        return self.key_hash[:KEY_ID_DIGITS]


NO_KEY = KeySet(key_hash="", tenant="")  # of clients without a tenant
KeyEvent = KeySet
