"""Query the requests of a catalog, as of any moment.

A query reads a bounded number of rows. If a filter matches few of them, a page has fewer requests than wanted, or none,
and the next page continues after the rows that were read.
"""

import sqlite3
from dataclasses import dataclass
from typing import Any

import msgspec

from forebay.events.request_ids import log_id_of
from forebay.replay.catalog.facts import RequestPage, RequestRow, RequestState
from forebay.replay.catalog.request_steps import COLUMNS, ENDED, STATES, UNSUCCESSFUL, Row, decode_steps, mean_itl_us

PAGE_MAX = 500
WINDOW_ROWS = 1_000  # rows that a query reads at first; then twice as many, and so on
SCAN_MAX = 63 * WINDOW_ROWS  # rows that a query reads: about 50 ms of work
NO_BOUND = (1 << 63) - 1
_COLUMNS = ", ".join(COLUMNS)


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Conditions that a request must meet, all of them as of the moment of the query.

    `text` must be part of the ID, with the same case. `is_unsuccessful` selects failed, rejected and aborted requests.
    """

    state: RequestState | None = None
    model: str = ""
    tenant: str = ""
    worker_id: str = ""
    slow_us: int | None = None
    is_unsuccessful: bool = False
    text: str = ""


NO_FILTER = RequestFilter()


def requests(
    connection: sqlite3.Connection,
    at_us: int | None = None,
    conditions: RequestFilter = NO_FILTER,
    before: int | None = None,
    limit: int = 100,
) -> RequestPage:
    """Return the requests that were submitted by a moment and meet a filter, newest first.

    If `before` is not None, only requests with a lower number are returned. A page has it as `next_before`.
    """
    moment_us, limit = NO_BOUND if at_us is None else at_us, max(1, min(limit, PAGE_MAX))
    first = min(NO_BOUND if before is None else before, _first_after(connection, moment_us))
    index = _index_test(conditions, moment_us)
    tests, values = _tests(conditions, index, moment_us)
    page: list[RequestRow] = []
    scanned, size = 0, WINDOW_ROWS
    while scanned < SCAN_MAX:
        last = _window_end(connection, index, first, min(size, SCAN_MAX - scanned))
        for row in connection.execute(_statement(tests), [first, last, *values] * 2):
            found = row_as_of(row, moment_us)
            if _meets(found, conditions):
                page.append(found)
                if len(page) > limit:
                    return RequestPage(requests=page[:limit], next_before=page[limit - 1].number)
        if last < 0:
            return RequestPage(requests=page, next_before=None)
        scanned, first, size = scanned + size, last, 2 * size
    return RequestPage(requests=page, next_before=first)


def request(connection: sqlite3.Connection, number: int, at_us: int | None = None) -> RequestRow | None:
    """Return the request with this number as of a moment; None if the catalog does not have it by then."""
    moment_us = NO_BOUND if at_us is None else at_us
    for table in ("unrecorded_requests", "requests"):
        for row in connection.execute(f"SELECT {_COLUMNS} FROM {table} WHERE number = ?", [number]):
            found = row_as_of(row, moment_us)
            return found if found.submitted_us <= moment_us else None
    return None


def row_as_of(row: Row, moment_us: int) -> RequestRow:
    """Return a request as of a moment, `NO_BOUND` for the newest state."""
    values: dict[str, Any] = dict(zip(COLUMNS, row, strict=True))
    encoded = values.pop("steps")
    for name in ("is_unsuccessful", "is_partial"):
        del values[name]
    if moment_us < NO_BOUND and not ((ended_us := values["ended_us"]) is not None and ended_us <= moment_us):
        values |= _values_as_of(values, encoded, moment_us)
    itl_us = mean_itl_us(values["first_token_us"], values["ended_us"], values["output_tokens"])
    return RequestRow(**values, itl_us=itl_us)


def _values_as_of(values: dict[str, Any], encoded: bytes, moment_us: int) -> dict[str, Any]:
    """Return the values that differ at the moment from the newest state, in which the request has gone further."""
    changed: dict[str, Any] = {
        "state": "submitted",
        "pool": "",
        "worker_id": "",
        "rank": 0,
        "attempt": 0,
        "reason": "",
        "output_tokens": None,
        "journal_offset": None,
        "ended_us": None,
    }
    for step in decode_steps(encoded):
        if values["submitted_us"] + step.after_us > moment_us:
            break
        changed["state"] = STATES[step.state]
        if step.journal_offset is not None:
            changed["journal_offset"] = step.journal_offset
        if step.place is not None:
            changed |= msgspec.structs.asdict(step.place)
    for name in ("routed_us", "first_token_us"):
        if values[name] is not None and values[name] > moment_us:
            changed[name] = None
            if name == "first_token_us":
                changed |= {"cached_tokens": None, "ttft_us": None}
    return changed


def _tests(conditions: RequestFilter, index: str, moment_us: int) -> tuple[str, list[int | str]]:
    tests, values = ["number < ? AND number >= ?"], list[int | str]()
    if index:
        tests.append(index)
    for name, value in (("model", conditions.model), ("tenant", conditions.tenant)):
        if value:
            tests.append(f"{name} = ?")
            values.append(value)
    if conditions.worker_id:
        # A request that is active at the moment may have been routed to another worker since.
        tests.append("(worker_id = ? OR ended_us IS NULL OR ended_us > ?)")
        values += [conditions.worker_id, moment_us]
    if conditions.slow_us is not None:
        tests.append("ttft_us >= ? AND first_token_us <= ?")
        values += [conditions.slow_us, moment_us]
    if conditions.text:
        tests.append("instr(request_id, ?)")
        values.append(log_id_of(conditions.text))
    if conditions.is_unsuccessful:
        tests.append("ended_us <= ?")
        values.append(moment_us)
    if conditions.state in ENDED:
        tests.append("state = ? AND ended_us <= ?")
        values += [conditions.state, moment_us]
    elif conditions.state is not None:
        tests.append("(ended_us IS NULL OR ended_us > ?)")
        values.append(moment_us)
    return " AND ".join(tests), values


def _statement(tests: str) -> str:
    """Return a statement that reads rows, newest first, and prefers those with events after the journal."""
    return (
        f"SELECT {_COLUMNS} FROM unrecorded_requests WHERE {tests} UNION ALL SELECT {_COLUMNS} FROM requests"
        f" WHERE {tests} AND number NOT IN (SELECT number FROM unrecorded_requests) ORDER BY number DESC"
    )


def _index_test(conditions: RequestFilter, moment_us: int) -> str:
    """Return the condition of an index that contains all rows which may meet the filter; empty if there is none."""
    if conditions.is_unsuccessful or conditions.state in UNSUCCESSFUL:
        return "is_unsuccessful = 1"
    is_active = conditions.state is not None and conditions.state not in ENDED
    return "ended_us IS NULL" if is_active and moment_us == NO_BOUND else ""


def _window_end(connection: sqlite3.Connection, index: str, first: int, size: int) -> int:
    """Return the lowest number of the `size` newest rows before `first`, or -1 if there are not as many.

    If `index` is a condition of an index, only its rows count.
    """
    test = f"number < ? AND {index}" if index else "number < ?"
    select = f"SELECT number FROM requests WHERE {test} ORDER BY number DESC LIMIT 1 OFFSET ?"
    for (number,) in connection.execute(select, [first, size - 1]):
        return int(number)
    return -1


def _first_after(connection: sqlite3.Connection, moment_us: int) -> int:
    found = [NO_BOUND]
    for table in ("requests", "unrecorded_requests"):
        select = f"SELECT number FROM {table} WHERE submitted_us > ? ORDER BY submitted_us, number LIMIT 1"
        found += [number for (number,) in connection.execute(select, [moment_us])]
    return min(found)


def _meets(found: RequestRow, conditions: RequestFilter) -> bool:
    return (conditions.state is None or found.state == conditions.state) and (
        not conditions.worker_id or found.worker_id == conditions.worker_id
    )
