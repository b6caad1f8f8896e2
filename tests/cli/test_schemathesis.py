"""Generated valid and invalid requests from /openapi.json against a running `forebay up`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.up import ADMIN_TOKEN, running
from tests.depth import is_quick

SCHEMATHESIS = str(Path(sys.executable).with_name("schemathesis"))
SEED = 15
# `make test-all` spends a minute: every boundary value of every field, then random bodies. `make test` spends seconds.
PHASES, EXAMPLES, CASES_MIN = ("fuzzing", 2, 2) if is_quick() else ("coverage,fuzzing", 20, 500)
WITHIN_S = 540.0  # on a busy machine
CONFIG = """
[checks.not_a_server_error]
# A timeout of a microsecond, and a log in memory that is to be explained, are no faults of the server.
expected-statuses = ["2xx", "3xx", "4xx", "501", "502", "503", "504"]
"""
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method,ignored_auth"
)
# JSON Schema cannot express which characters of an adapter name are printable in Unicode, which tokens and chats a
# model accepts, and which ranges of a grid fit together. Other routes reject most random bodies because of an unknown
# model, but tokenizing needs no model name.
INEXACT = "lora|commands|tokenize|pools/routing"
# Nor that `tool_choice` names one of the tools. A route query takes the body of a completion, but has one prompt. And
# the model decides which token ids and dimensions are valid.
PROMPTS = "completions|route|embeddings"


@pytest.mark.parametrize(
    "options",
    [
        ("--exclude-path-regex", f"{INEXACT}|{PROMPTS}", "--checks", f"{CHECKS},positive_data_acceptance"),
        pytest.param(("--include-path-regex", PROMPTS, "--checks", CHECKS), marks=pytest.mark.slow),
        pytest.param(("--include-path-regex", INEXACT, "--checks", CHECKS), marks=pytest.mark.slow),
    ],
    ids=["exact", "prompts", "inexact"],
)
@pytest.mark.timeout(600)
def test_the_service_conforms_to_its_openapi_document(tmp_path: Path, options: tuple[str, ...]) -> None:
    # Nobody reads the output of this system until it ends, and thousands of access lines would fill the pipe.
    with running("--admin-api", "--workers", "2", "--timeout-s", "10", "--no-access-log") as up:
        config = tmp_path / "schemathesis.toml"
        config.write_text(CONFIG)
        command = [
            *(
                SCHEMATHESIS,
                "--config-file",
                str(config),
                "run",
                f"{up.url}/openapi.json",
                "--header",
                f"Authorization: Bearer {ADMIN_TOKEN}",
            ),
            *("--seed", str(SEED), "--max-examples", str(EXAMPLES), "--phases", PHASES),
            *options,
            *("--continue-on-failure", "--no-color"),
            *("--generation-database", "none", "--suppress-health-check", "all", "--request-timeout", "60"),
        ]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=WITHIN_S)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    cases = re.search(r"(\d+) generated", run.stdout)
    assert cases is not None, run.stdout
    assert int(cases[1]) >= CASES_MIN, run.stdout
