"""Clients of the Kafka API: they produce to `openai-requests` and read `openai-responses`."""

from typing import Any
from zlib import crc32

import msgspec

from forebay.events.base import unpack_u32
from forebay.events.request_ids import kafka_api_request_id
from forebay.events.topics import OPENAI_REQUESTS, OPENAI_RESPONSES
from forebay.ingress.model import NO_TEXT
from forebay.transport.base import Draft, Record
from tests.faults.cluster import MODEL, Cluster
from tests.faults.effects import Violation
from tests.faults.invariants import expected_tokens, planned_outcome
from tests.faults.kafka.server import API_PARTITIONS
from tests.faults.plan import PlannedRequest
from tests.faults.services import GROUP

OK = "200"
TIMED_OUT = "504"  # if the output arrives later, a response that is sent again has the output
UNSTABLE = frozenset((TIMED_OUT, "409"))


class KafkaClient:
    """One client of the Kafka API, which sends one request and never cancels it.

    Attributes:
        outcome: state of the request. It has no tokens, because the API returns text.
    """

    def __init__(self, cluster: Cluster, planned: PlannedRequest) -> None:
        self.outcome = planned_outcome(planned, kafka_api_request_id(planned.name))
        self._cluster = cluster
        self._planned = planned
        self._read = [0] * API_PARTITIONS

    @property
    def is_done(self) -> bool:
        """Whether the last record of a response was written."""
        outcome, log = self.outcome, self._cluster.broker
        if outcome.state == "pending":
            for partition in range(API_PARTITIONS):
                records = log.records((OPENAI_RESPONSES.name, partition))
                for record in records[self._read[partition] :]:
                    headers = record.headers or {}
                    if record.key == self._key and headers["last"] == "1":
                        outcome.state, outcome.detail = "answered", headers["status"]
                self._read[partition] = len(records)
        return outcome.state == "answered"

    async def run(self) -> None:
        """Append the request to the topic, as any Kafka client does."""
        planned, outcome = self._planned, self.outcome
        outcome.state = "pending"
        body: dict[str, Any] = {
            "model": GROUP,
            "prompt": unpack_u32(outcome.prompt),
            "max_tokens": planned.max_tokens,
            "temperature": outcome.sampling.temperature,
            "stream": planned.own_tokens % 2 == 0,
            "ignore_eos": True,
        }
        if planned.seed is not None:
            body["seed"] = planned.seed
        partition = crc32(self._key) % API_PARTITIONS
        headers = {"request-id": planned.name, "path": "/v1/completions"}
        draft = Draft(OPENAI_REQUESTS.name, partition, msgspec.json.encode(body), self._key, headers)
        self._cluster.broker.append(draft, self._cluster.wall_us())

    def check(self) -> None:
        """Check all records of the response, also those that were sent again. Raises Violation."""
        name = self._planned.name
        first: dict[str, Record] = {}
        for record in self._records():
            headers = record.headers or {}
            if headers["status"] in UNSTABLE:
                continue
            earlier = first.setdefault(headers["index"], record)
            if (earlier.value, earlier.headers) != (record.value, record.headers):
                raise Violation(
                    f"{name}: record {headers['index']} of its response was sent as {earlier.value!r}, then as"
                    f" {record.value!r}"
                )
        if sorted(map(int, first)) != list(range(len(first))):
            raise Violation(f"{name}: its response has the records {sorted(map(int, first))}")
        statuses = {(record.headers or {})["status"] for record in first.values()}
        is_whole = any((record.headers or {})["last"] == "1" for record in first.values())
        if statuses == {OK} and is_whole:
            self._check_text([first[str(index)].value for index in range(len(first))])

    def _check_text(self, values: list[bytes]) -> None:
        outcome = self.outcome
        bodies = [msgspec.json.decode(value) for value in values]
        text = "".join(choice["text"] for body in bodies for choice in body["choices"])
        tokens = expected_tokens(outcome.request_id, outcome.prompt, outcome.sampling)
        expected = MODEL.tokenizer.decode(tokens).rstrip(NO_TEXT)  # a stream omits an incomplete character at its end
        if text.rstrip(NO_TEXT) != expected:
            raise Violation(f"{outcome.name}: its response is {text!r}, expected {expected!r}")

    @property
    def _key(self) -> bytes:
        return self._planned.name.encode()

    def _records(self) -> list[Record]:
        log = self._cluster.broker
        places = [(OPENAI_RESPONSES.name, partition) for partition in range(API_PARTITIONS)]
        return [record for place in places for record in log.records(place) if record.key == self._key]
