"""Unique ids of HTTP requests whose clients chose an id, and ids of the parts of a request.

A client may send the same id (`x-request-id`) with several requests, to correlate them with its own records. On the log
each request needs an id of its own. So the ingress appends `SEPARATOR` and a random number to the id of the client.

A request of a client with several choices, prompts or inputs is several requests on the log, its parts. Their ids are
the id of the client's request and a position.
"""

import re
from collections.abc import Sequence

SEPARATOR = "~"  # not allowed in ids of clients, and needs no escape in a URL or a shell
PART = re.compile(rf"(.*{SEPARATOR}[0-9a-f]+|(?:chatcmpl|cmpl|embd)-[0-9a-f]+)-[0-9]+")  # ids that an ingress made
NUMBER_BYTES = 6  # random; an owner remembers few requests with one client id at a time, so a collision is unlikely


def unique_id(client_id: str, number: int) -> str:
    """Return the id that a request gets on the log.

    Args:
        client_id: id that the client chose.
        number: random number of `NUMBER_BYTES` bytes.
    """
    return f"{client_id}{SEPARATOR}{number:0{2 * NUMBER_BYTES}x}"


def client_id_of(request_id: str) -> str:
    """Return the id that the client chose, or `request_id` itself if the client chose none."""
    return request_id.partition(SEPARATOR)[0]


def part_id(request_id: str, index: int) -> str:
    """Return the id that one part of a request gets on the log.

    Args:
        request_id: id of the client's request.
        index: position of the part, from 0.
    """
    return f"{request_id}-{index}"


def choice_ids(request_id: str, count: int) -> Sequence[str]:
    """Return the ids that the choices of a request get on the log. A single choice has the id of the request."""
    return [request_id] if count == 1 else [part_id(request_id, index) for index in range(count)]


def aliases_of(request_id: str) -> frozenset[str]:
    """Return all ids of a request: its id on the log, the client's, and that of the whole request if it is a part."""
    part = PART.fullmatch(request_id)
    whole = request_id if part is None else part[1]
    return frozenset((request_id, whole, client_id_of(whole)))
