"""`forebay topics acls` lists the ACLs of each role. `tests/integration/test_security.py` proves them on a broker."""

import re
from pathlib import Path

from forebay.events.topics import topic_named
from forebay.transport.kafka.acls import ROLES
from tests.cli.in_process import error_of, forebay

PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def listed(*arguments: str) -> list[tuple[str, ...]]:
    run = forebay("topics", "acls", *arguments)
    assert run.returncode == 0, run.stderr
    return [tuple(re.split(r" {2,}", line.strip())) for line in run.stdout.splitlines()[1:]]


def test_each_role_has_its_acls_under_its_user_names() -> None:
    rows = listed("--namespace", "n", "--user", "router=r", "--user", "client=shop", "--user", "client=press")
    users = {row[0] for row in rows}
    assert users == {*ROLES} - {"router", "client"} | {"r", "shop", "press"}
    assert ("r", "topic", "n.decisions", "write") in rows
    assert ("r", "topic", "n.work.*", "write") in rows
    assert ("worker", "topic", "n.work.*", "create") in rows
    assert ("ingress", "group", "n.kafka-api", "read") in rows
    assert ("console", "cluster", "kafka-cluster", "idempotent write") in rows
    assert [row for row in rows if row[0] == "shop" and row[3] == "write"] == [
        ("shop", "topic", "n.openai-requests", "write")
    ]


def test_an_invalid_user_is_rejected() -> None:
    assert "unknown role 'routr'" in error_of("topics", "acls", "--user", "routr=x")
    assert error_of("topics", "acls", "--user", "router") == "--user router: expected ROLE=NAME"


def test_the_page_lists_what_each_role_writes() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]*\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    expected = {
        name: "everything; creates topics"
        if role.writes == "*"
        else (", ".join(f"`{one}`" for one in role.writes.split()) or "nothing")
        + "".join(f"; creates `{one}`" for one in role.creates.split())
        + "".join(f"; adds partitions to `{one}`" for one in role.extends.split())
        for name, role in ROLES.items()
    }
    assert dict(rows) == expected


def test_roles_name_topics() -> None:
    names = {name for role in ROLES.values() for text in role[:3] for name in text.split()} - {"*", "replies.*"}
    assert all(topic_named(name) for name in names)
