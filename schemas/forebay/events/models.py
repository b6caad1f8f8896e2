"""Topic `models`: model cards, aliases, and the files of models that an ingress needs, without weights.

Partition 0 has one `ModelStored` per model card, with the digest of the card as its key, and one `AliasSet` per alias.
Partition 1 has the content of the files in pieces. Compaction keeps both for ever, until a record without a value
removes them. Offsets stay valid after compaction, so a reader finds each piece by the offset in `ModelStored`. Replays
do not use this topic.
"""

from hashlib import sha256
from typing import Annotated

import msgspec

from forebay.events.base import Count, Event, Name, Part
from forebay.events.privacy import KEPT, OperatorName, SystemName

CHUNK_BYTES_MAX = 512 << 10  # compressed bytes of a piece: half of the default record limit of brokers
FILES_MAX = 64
TARGETS_MAX = 16
WEIGHT_MAX = 1e6

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64), KEPT]
CardDigest = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$", max_length=64), KEPT]  # empty for no card
Text = Annotated[str, msgspec.Meta(max_length=256), KEPT]


class ModelFile(Part, frozen=True, kw_only=True):
    """One file of a model.

    Attributes:
        name: file name in the model directory.
        sha256: SHA-256 of its content.
        size: its size in bytes.
    """

    name: SystemName
    sha256: Sha256
    size: Count


class ModelCard(Part, frozen=True, kw_only=True):
    """Properties of a model that decide which prompts and responses its engines accept and give.

    Equal cards have equal digests. The block size is no part of it, because pools have their own.

    Attributes:
        files: tokenizer, chat template and configuration files, ordered by name.
        context_tokens: maximum number of tokens of a prompt and its response together.
        dtype: type of the weights, for example `bfloat16`; empty if unknown.
        revision: commit of the model on its hub; empty if unknown.
        tool_call_parser: parser for tool calls; empty for none.
        reasoning_parser: parser for reasoning; empty for none.
    """

    files: Annotated[tuple[ModelFile, ...], msgspec.Meta(max_length=FILES_MAX)]
    context_tokens: Count
    dtype: Text = ""
    revision: Text = ""
    tool_call_parser: Text = ""
    reasoning_parser: Text = ""

    def digest(self) -> str:
        """Return the SHA-256 of the card as 64 hex digits. It covers the content of the files by their hashes.

        The revision does not count, because a copy of the same files may have none.
        """
        compared = msgspec.structs.replace(self, revision="")
        return sha256(msgspec.json.encode(compared, order="deterministic")).hexdigest()


class StoredFile(Part, frozen=True, kw_only=True):
    """Location of the content of a file.

    Attributes:
        sha256: SHA-256 of the content.
        offsets: offsets of its pieces in partition 1, in order.
    """

    sha256: Sha256
    offsets: tuple[Count, ...]


class ModelStored(Event, tag="model.stored", frozen=True, kw_only=True):
    """A model card and the content of its files are on this topic. The record key is the digest of the card.

    Attributes:
        model: name of the model for which the card was stored first.
        card: the card.
        stored: location of each content.
    """

    model: SystemName
    card: ModelCard
    stored: tuple[StoredFile, ...]
    at_us: int = 0


class FileChunk(Event, tag="model.file_chunk", frozen=True, kw_only=True):
    """One piece of the content of a file, compressed with zlib as a whole.

    Attributes:
        sha256: SHA-256 of the uncompressed content.
        upload: id of the upload, because several workers may store a file at the same time.
        index: number of the piece, from 0.
        data: the piece.
    """

    sha256: Sha256
    upload: Annotated[Name, KEPT]
    index: Count
    data: Annotated[bytes, KEPT]

    @property
    def key(self) -> bytes:
        """Key of the record."""
        return f"{self.sha256}/{self.upload}/{self.index}".encode()


class AliasTarget(Part, frozen=True, kw_only=True):
    """One model behind an alias.

    Attributes:
        weight: share of the requests, relative to the other targets.
    """

    model: SystemName
    weight: Annotated[float, msgspec.Meta(gt=0, le=WEIGHT_MAX)] = 1.0


class AliasSet(Event, tag="model.alias_set", frozen=True, kw_only=True):
    """An alias names these models from now on. The record key is `alias/` and the name. The newest event counts.

    Attributes:
        alias: name that requests use.
        targets: the models; empty to remove the alias.
        fallback: model that gets the requests while no target has a ready worker; empty for none.
    """

    alias: SystemName
    targets: Annotated[tuple[AliasTarget, ...], msgspec.Meta(max_length=TARGETS_MAX)]
    fallback: Annotated[str, msgspec.Meta(max_length=256), KEPT] = ""
    operator: OperatorName = ""
    at_us: int = 0

    @property
    def key(self) -> bytes:
        """Key of the record."""
        return f"alias/{self.alias}".encode()


ModelEvent = ModelStored | FileChunk | AliasSet
