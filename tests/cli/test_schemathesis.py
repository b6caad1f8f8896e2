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
PHASES, EXAMPLES, CASES_MIN = ("fuzzing", 2, 10) if is_quick() else ("coverage,fuzzing", 20, 500)
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
# JSON Schema cannot express which characters of an adapter name are printable in Unicode.
ADAPTERS = "lora|commands"


@pytest.mark.parametrize(
    "options",
    [
        ("--exclude-path-regex", ADAPTERS, "--checks", f"{CHECKS},positive_data_acceptance"),
        pytest.param(("--include-path-regex", ADAPTERS, "--checks", CHECKS), marks=pytest.mark.slow),
    ],
    ids=["all-but-adapters", "adapters"],
)
@pytest.mark.timeout(600)
def test_the_service_conforms_to_its_openapi_document(tmp_path: Path, options: tuple[str, ...]) -> None:
    with running("--admin-api", "--workers", "2", "--timeout-s", "10") as up:
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
