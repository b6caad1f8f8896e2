"""Failures of HTTP connections by kind."""

import httpx

from forebay.cli.common.failures import TEXT_CHARS_MAX, Failure


def transport_failure(error: httpx.HTTPError, *, streaming: bool) -> Failure:
    """Return the failure of a request without a complete response.

    Args:
        error: error of the HTTP client.
        streaming: whether the response had begun.
    """
    if isinstance(error, httpx.TimeoutException):
        kind = "timeout"
    elif streaming:
        kind = "broken stream"
    elif isinstance(error, httpx.ConnectError):
        kind = "connection refused" if _is_refused(error) else "no connection"
    else:
        kind = "connection lost before the response"
    return Failure(kind, repr(error)[:TEXT_CHARS_MAX])


def _is_refused(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, is a refused connection."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, ConnectionRefusedError):
            return True
        todo += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            todo += one.exceptions
    return False
