"""Ids of requests on the log, and the ids of clients in them.

A client may send the same id (`x-request-id`) with several HTTP requests, to correlate them with its own records. On
the log each request needs an id of its own. So the ingress appends `SEPARATOR` and a random number to the id of the
client, or to a random id if the client chose none. Ids of Kafka API requests are unique among themselves. They get
`SEPARATOR` and `KAFKA_API`, so that no HTTP client can choose an id that is on the log.

The id in a response of HTTP, the public id, is the id on the log, `SEPARATOR`, and the location of the request on the
topic `requests`. So any ingress finds the request. Nobody can guess it from another id, because of the random number.

A request of a client with several choices, prompts or inputs is several requests on the log, its parts. Their ids are
the id of the whole request and a position.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

SEPARATOR = "~"  # not allowed in ids of clients, and needs no escape in a URL or a shell
KAFKA_API = "kafka"  # never equal to a number, because a `k` is not a hexadecimal digit
NUMBER_BYTES = 8  # random, so that a client cannot guess the id of another request
PUBLIC_ID = re.compile(rf"(.+){SEPARATOR}([0-9a-f]{{1,8}})\.([0-9a-f]{{1,16}})")


class RequestLocation(NamedTuple):
    """Location of a request on the topic `requests`."""

    partition: int
    offset: int


def public_id(request_id: str, location: RequestLocation) -> str:
    """Return the id of a request on the log and its location as one id, for clients."""
    return f"{request_id}{SEPARATOR}{location.partition:x}.{location.offset:x}"


def parse_public_id(given: str) -> tuple[str, RequestLocation | None]:
    """Return the id on the log and the location that a public id contains; None if `given` has no location."""
    found = PUBLIC_ID.fullmatch(given)
    if found is None:
        return given, None
    return found[1], RequestLocation(int(found[2], 16), int(found[3], 16))


def log_id_of(given: str) -> str:
    """Return an id without the location that a public id contains."""
    return parse_public_id(given)[0]


def http_request_id(client_id: str, number: int) -> str:
    """Return the id that an HTTP request gets on the log.

    Args:
        client_id: id that the client chose, or a random id.
        number: random number of `NUMBER_BYTES` bytes.
    """
    return f"{client_id}{SEPARATOR}{number:0{2 * NUMBER_BYTES}x}"


def kafka_api_request_id(client_id: str) -> str:
    """Return the id that a Kafka API request gets on the log, given its `request-id`."""
    return f"{client_id}{SEPARATOR}{KAFKA_API}"


def client_id_of(request_id: str) -> str:
    """Return the part of an id on the log before `SEPARATOR`: the id that the client chose, if it chose one."""
    return request_id.partition(SEPARATOR)[0]


def part_id(request_id: str, index: int) -> str:
    """Return the id that one part of a request gets on the log.

    Args:
        request_id: id of the whole request.
        index: position of the part, from 0.
    """
    return f"{request_id}-{index}"


def part_ids(request_id: str, count: int) -> Sequence[str]:
    """Return the ids that the parts of a request get on the log. A single part has the id of the request."""
    return [request_id] if count == 1 else [part_id(request_id, index) for index in range(count)]


def whole_id(first_id: str, count: int) -> str:
    """Return the id of a request whose first of `count` parts has this id on the log."""
    return first_id if count == 1 else first_id.removesuffix(part_id("", 0))


def aliases_of(request_id: str) -> frozenset[str]:
    """Return all ids of a request: its id on the log, the client's, and that of the whole request if it is a part."""
    client_id, separator, unique = request_id.partition(SEPARATOR)
    return frozenset((request_id, client_id + separator + unique.partition("-")[0], client_id))
