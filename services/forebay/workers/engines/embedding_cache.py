"""Cache of the embeddings of images and videos, for images that several requests contain."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from forebay.events.work import WorkItem
from forebay.runtime.metrics import counter, gauge
from forebay.workers.kv_transfer.embeddings import Array

Key = tuple[str, str, str, int]


class EncodedMedia(NamedTuple):
    """Embeddings of one image or video, of shape [placeholder tokens, width].

    `metadata` is a JSON object for the engine that uses the embeddings; empty if the engine needs nothing else.
    """

    embeddings: Array
    metadata: bytes = b""

    @property
    def size(self) -> int:
        return self.embeddings.nbytes + len(self.metadata)


def cache_keys(item: WorkItem) -> list[Key]:
    """Return the key of each image and video of a request.

    Cache namespaces share no embeddings. Otherwise the time of a response would reveal the images of other clients.
    """
    return [(item.cache_namespace, one.kind, one.digest, one.tokens) for one in item.media]


class EmbeddingCache(Collector):
    """Embeddings of one encoder, of at most `bytes_max` bytes. The least recently used ones are evicted first.

    Use it on one thread. Its metrics can be collected on any thread.
    """

    def __init__(self, bytes_max: int) -> None:
        self.worker_id = ""
        self._bytes_max = bytes_max
        self._kept: OrderedDict[Key, EncodedMedia] = OrderedDict()
        self._size = 0
        self._hits = 0
        self._misses = 0

    def find(self, keys: Sequence[Key]) -> dict[Key, EncodedMedia]:
        """Return the cached embeddings of the images and videos of a request."""
        found = {key: self._kept[key] for key in keys if key in self._kept}
        for key in found:
            self._kept.move_to_end(key)
        hits = sum(key in found for key in keys)
        self._hits += hits
        self._misses += len(keys) - hits
        return found

    def put(self, key: Key, encoded: EncodedMedia) -> None:
        """Keep a copy of embeddings that `find` did not return, unless they are larger than the whole cache."""
        if encoded.size > self._bytes_max:
            return
        # A slice would keep the array of the whole request, and the encoder may write to its array again.
        self._kept[key] = encoded._replace(embeddings=encoded.embeddings.copy())
        self._size += encoded.size
        while self._size > self._bytes_max:
            _, evicted = self._kept.popitem(last=False)
            self._size -= evicted.size

    def collect(self) -> Iterator[Metric]:
        for name, text, value in (
            ("hits", "Images and videos whose embeddings were in the cache.", self._hits),
            ("misses", "Images and videos whose embeddings were not in the cache.", self._misses),
        ):
            yield counter(f"forebay_embedding_cache_{name}", text, {self.worker_id: value}, "worker_id")
        text = "Size of the cached embeddings in bytes."
        yield gauge("forebay_embedding_cache_bytes", text, {self.worker_id: self._size}, "worker_id")
