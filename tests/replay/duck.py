"""DuckDB asked in a process of its own: as it ends it tells the whole terminal what its bindings leaked."""

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


def ask(folder: Path, *queries: str) -> list[list[list[Any]]]:
    """The rows of each query to the views of an export; what is no number, text or list comes as text."""
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
