"""Run DuckDB queries in a separate process, because its bindings print leak warnings to the terminal at exit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = """
import json, sys
import duckdb
with duckdb.connect() as db:
    for statement in open("views.sql").read().splitlines():
        db.execute(statement).fetchall()
    answers = [db.execute(query).fetchall() for query in json.load(sys.stdin)]
json.dump(answers, sys.stdout, default=str)
"""


def query_export(folder: Path, *queries: str) -> list[list[list[Any]]]:
    """Return the rows of each query on the views of an export.

    Values other than numbers, text and lists are returned as text.
    """
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        input=json.dumps(queries),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    answers: list[list[list[Any]]] = json.loads(run.stdout)
    return answers
