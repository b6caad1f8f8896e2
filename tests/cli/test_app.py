"""The commands, their help and names, where options come from, `forebay config`, and exit codes."""

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from forebay.cli.app import app
from forebay.cli.common import extras
from forebay.cli.common.command_class import SERVICE_OPTIONS, CliCommand
from forebay.cli.common.config_file import SERVICES
from forebay.cli.common.options import Number
from forebay.processes.service import leases_at
from forebay.runtime.errors import ConfigError, install_command
from tests.cli.in_process import error_of, forebay
from tests.command_line import commands, options
from tests.harness.local import free_ports

runner = CliRunner()
# Modules that take long to import, and that no help text needs. `rich` also draws the tables of results.
HEAVY = {
    *("aiokafka", "asyncio", "fakeredis", "fastapi", "faust", "httpx", "huggingface_hub", "jinja2", "kubernetes"),
    *("numpy", "prometheus_client", "pydantic", "redis", "rich", "scipy", "sqlite3", "starlette"),
    *("tokenizers", "torch", "uvicorn", "uvloop", "yaml", "forebay.workers.service"),
}
# A process prints the help of every command, all from the same state, and then the modules that it has imported.
HELP_OF_ALL = """
import sys
from forebay.cli.app import app
from tests.command_line import commands

app(["--help"], standalone_mode=False)
for path, _ in commands():
    app([*path, "--help"], standalone_mode=False)
print(*sys.modules, file=sys.stderr)
"""


def test_every_command_shows_all_of_its_options() -> None:
    for path, command in commands():
        wanted = "--help-all" if isinstance(command, CliCommand) and command.basic else "--help"
        shown = runner.invoke(app, [*path, wanted]).output
        for option in options(command):
            assert option.hidden or re.search(rf"(^|\s){option.opts[-1]}\b", shown), (path, option.opts)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_full_output_device_is_reported_in_one_line(more: list[str]) -> None:
    command = [sys.executable, "-m", "forebay.cli", "workload", "show", "synthetic:requests=3", *more]
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr == "forebay: cannot write results: No space left on device\n"


def test_help_imports_no_client_and_no_server() -> None:
    ran = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert HEAVY & set(ran.stderr.split()) == set()
    assert ran.stdout.count("Usage: ") == 1 + len(list(commands()))


REQUIRED = {path: needed for path, command in commands() if (needed := [one for one in command.params if one.required])}


@pytest.mark.parametrize("path", REQUIRED, ids=" ".join)
def test_a_command_without_a_required_value_names_it(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "commands", {})  # `config` makes the parameters of the commands that it has seen optional
    for missing in REQUIRED[path]:
        others = [[one.opts[-1]] * isinstance(one, click.Option) + ["1"] for one in REQUIRED[path] if one != missing]
        ran = forebay(*path, *(word for words in others for word in words))
        assert ran.returncode == 2, ran.stderr
        assert f"Error: Missing {missing.param_type_name} " in ran.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [("forebay sim", "simulate"), ("forebay up --router-mo", "--router-mode"), ("forebay topics ta", "tail")],
)
def test_shell_completion_completes_commands_and_options(words: str, expected: str) -> None:
    count = len(words.split()) - 1
    variables = {"_FOREBAY_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    assert runner.invoke(app, [], env=variables, prog_name="forebay").output.splitlines() == [f"plain,{expected}"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["up", "--prot", "1"], "unknown option '--prot'; did you mean --port?"),
        (["--helpx"], "unknown option '--helpx'; did you mean --help?"),
        (["control", "adaptors"], "unknown command 'adaptors'; did you mean adapters?"),
        (["topics", "lst"], "unknown command 'lst'; did you mean list?"),
        (["topics", "x"], "unknown command 'x'; commands are: create, list, tail"),
        (["topics", "list", "-x"], "unknown option '-x'; options are: --kafka, "),
        (["up", "--log-format", "jsn"], "unknown value 'jsn'; did you mean json?"),
    ],
)
def test_error_for_an_unknown_name_suggests_similar_names(arguments: list[str], expected: str) -> None:
    refused = runner.invoke(app, arguments)
    assert refused.exit_code == 2
    assert expected in refused.output


RECORDING = "tests/logs/kv.rec"
# One value means the same to every command.
ONE_OR_SEVERAL = {"FOREBAY_API_KEY", "FOREBAY_GROUP", "FOREBAY_MODEL", "FOREBAY_URL"}


def shown(*arguments: str) -> dict[str, Any]:
    run = forebay("config", "--json", *arguments)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def written(folder: Path, text: str) -> str:
    path = folder / "forebay.toml"
    path.write_text(text)
    return str(path)


def test_every_option_has_the_variable_of_its_name_or_belongs_to_services() -> None:
    for path, command in commands():
        for option in options(command):
            name = option.opts[0].removeprefix("--")
            is_exempt = not getattr(option, "has_variable", True) or (
                "-".join(path) not in SERVICES and name in SERVICE_OPTIONS
            )
            expected = None if is_exempt else "FOREBAY_" + name.replace("-", "_").upper()
            assert option.envvar == expected, (path, name)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("control policy POOL", "set"),
        ("control drain POOL", "remove"),
        ("tiers purge PLACE", "all"),
        ("tiers purge PLACE", "yes"),
        ("console", "url"),
        ("worker", "host"),
        ("control power", "worker"),
        ("control adapters", "lora"),
        ("control power", "model"),
        ("simulate", "policy"),
    ],
)
def test_a_variable_for_another_command_changes_or_opens_nothing(
    command: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "FOREBAY_" + option.replace("-", "_").upper()
    monkeypatch.setenv(name, "true" if option in ("all", "remove", "yes") else "elsewhere")
    assert shown(*command.split())[option]["source"] == "default"


@pytest.mark.parametrize("count", ["0", "100001", "0000100000000000", "x"])
def test_numbers_of_partitions_have_a_bound(count: str) -> None:
    assert "expected TOPICS=N, with N from 1 to 100000" in error_of(
        "topics", "create", "--partitions", f"slots={count}"
    )


def test_options_with_the_same_variable_are_of_the_same_kind() -> None:
    kinds: dict[str, set[tuple[bool, bool]]] = {}
    for _, command in commands():
        for option in options(command):
            if option.envvar and option.envvar not in ONE_OR_SEVERAL:
                kinds.setdefault(str(option.envvar), set()).add((option.multiple, option.is_flag))
    assert {one: found for one, found in kinds.items() if len(found) > 1} == {}


def test_flag_precedes_variable_precedes_file_precedes_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, 'port = 1001\nhost = "a"\ntimeout-s = 5\n[up]\nhost = "b"\ntaint = ["x", "y"]\n')
    monkeypatch.setenv("FOREBAY_PORT", "1002")
    monkeypatch.setenv("FOREBAY_TIMEOUT_S", "6")
    found = shown("up", "--config", file, "--timeout-s", "7")
    assert found["timeout-s"] == {"value": 7.0, "source": "flag"}
    assert found["port"] == {"value": 1002, "source": "variable FOREBAY_PORT"}
    assert found["host"] == {"value": "b", "source": f"file host in {file}"}
    assert found["taint"]["value"] == ["x", "y"]
    assert found["dp-size"] == {"value": 1, "source": "default"}


def test_a_variable_and_a_file_set_flags_without_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "[worker]\nkv_events = false\n")
    monkeypatch.setenv("FOREBAY_CONFIG", file)
    monkeypatch.setenv("FOREBAY_ALLOW_SHARED_CACHE", "true")
    found = shown("worker")
    assert [found[name]["value"] for name in ("kv-events", "allow-shared-cache")] == [False, True]


@pytest.mark.parametrize(
    ("variable", "value", "arguments"),
    [
        ("FOREBAY_PORT", "eighty", ["up"]),
        ("FOREBAY_WORKERS", "0", ["simulate", "synthetic:"]),
        ("FOREBAY_KV_EVENTS", "perhaps", ["worker"]),
        ("FOREBAY_LOG_MAX_SIZE", "5", ["up"]),
    ],
)
def test_error_for_a_bad_value_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, arguments: list[str]
) -> None:
    monkeypatch.setenv(variable, value)
    ran = forebay(*arguments)
    assert (ran.returncode, variable in ran.stderr, value in ran.stderr) == (2, True, True)


@pytest.mark.parametrize(
    ("command", "option", "link"),
    [
        ("up", "port", "tcp://10.0.0.1:8000"),
        ("router", "metrics-port", "udp://10.0.0.1:53"),
        ("worker", "metrics-port", "sctp://[fd00::1]:9000"),
    ],
)
def test_a_service_link_of_kubernetes_does_not_set_a_port(
    monkeypatch: pytest.MonkeyPatch, command: str, option: str, link: str
) -> None:
    variable = f"FOREBAY_{option.upper().replace('-', '_')}"
    monkeypatch.setenv(variable, link)
    run = forebay("config", "--json", command)
    assert (run.returncode, json.loads(run.stdout)[option]["source"]) == (0, "default")
    (line,) = run.stderr.splitlines()
    assert f"ignored {variable}={link}" in line
    assert "enableServiceLinks: false" in line


def test_error_for_options_that_exclude_each_other_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_WORKERS", "2")
    ran = forebay("up", "--prefill-workers", "1", "--decode-workers", "1")
    assert ran.returncode == 2
    assert "note: --workers is set by FOREBAY_WORKERS" in ran.stderr


def test_a_log_file_on_the_command_line_overrides_kafka_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KAFKA", "127.0.0.1:1")
    for arguments in (["topics", "list", RECORDING], ["topics", "tail", RECORDING, "decisions"]):
        run = forebay(*arguments)
        assert (run.returncode, run.stderr) == (0, "")


def test_a_url_on_the_command_line_overrides_kafka_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KAFKA", "127.0.0.1:1")
    assert "does not respond" in error_of("status", "--url", f"http://127.0.0.1:{free_ports(1)}")


@pytest.mark.parametrize(("other", "name"), [(["--kafka", "127.0.0.1:1"], "--kafka"), ([RECORDING], "a log file")])
def test_a_url_and_another_source_on_the_command_line_are_an_error(other: list[str], name: str) -> None:
    assert f"--url and {name} exclude each other" in error_of("status", "--url", "http://127.0.0.1:1", *other)


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port", "not TOML"),
        ("admin-ap = true", "unknown key 'admin-ap'; did you mean admin-api?"),
        ("[ingres]\nport = 1", "unknown table 'ingres'; did you mean ingress?"),
        ("[{service}]\nxyz = 1", "[{service}]: unknown key 'xyz'; "),
        ("config = 'x'", "unknown key 'config'; "),
        ("metrics-port = 1\nmetrics_port = 2", "metrics-port appears twice"),
    ],
)
def test_error_for_an_invalid_file(tmp_path: Path, service: str, text: str, expected: str) -> None:
    file = written(tmp_path, text.format(service=service))
    more = ["x.py:X"] if service == "serve" or service.startswith("planner-") else []
    error = error_of(*service.split("-"), *more, "--config", file)
    assert f"--config {file}: " in error
    assert expected.format(service=service) in error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('port = "80"', 'port: expected a number, got "80"'),
        ("port = true", "port: expected one value, got true"),
        ("port = 70000", "port: expected a number less than or equal to 65535, got 70000"),
        ("model-name = 5", "model-name: expected a string, got 5"),
        ("kv-events = 1", "kv-events: expected true or false, got 1"),
        ("taint = 5", "taint: expected a string or an array of strings, got 5"),
        ("taint = [5]", "taint: expected a string or an array of strings, got [5]"),
        ("log = 2026-01-01", "log: expected one value, got 2026-01-01"),
    ],
)
def test_error_for_a_value_of_the_wrong_type(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in error_of("up", "--config", written(tmp_path, text))


@pytest.mark.parametrize("service", ["run", "supervise"])
def test_services_of_the_planner_read_the_file(tmp_path: Path, service: str) -> None:
    text = f'kafka = "a:1"\nid = "x"\n[planner-{service}]\nmetrics-port = 1001\n[up]\nport = 1002\n'
    file = written(tmp_path, text)
    found = shown("planner", service, "--config", file)
    assert [found[name]["value"] for name in ("kafka", "metrics-port", "config")] == ["a:1", 1001, file]
    assert found.get("id", {}).get("value") == ("x" if service == "run" else None)
    assert shown("up", "--config", file)["port"]["value"] == 1002
    error = error_of("planner", service, "pools.toml", "--config", written(tmp_path, "[planner]\n"))
    assert "unknown table 'planner'; did you mean planner-" in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["up", "--port", "70000"], "'--port': expected a number less than or equal to 65535, got 70000"),
        (["up", "--port", "x"], "'--port': expected a valid integer, got x"),
        (["topics", "create", "--replication", "0"], "expected a number greater than or equal to 1, got 0"),
        (["control", "pools", "--share", "2"], "'--share': expected a number less than or equal to 1, got 2"),
    ],
)
def test_error_for_a_bad_value_names_the_value(arguments: list[str], expected: str) -> None:
    assert expected in error_of(*arguments)


@pytest.mark.parametrize("arguments", [("trace", "synthetic:requests=1"), ("status",), ("control", "pools")])
def test_error_for_a_url_without_a_scheme(arguments: tuple[str, ...]) -> None:
    assert "expected a URL such as http://127.0.0.1:8000" in error_of(*arguments, "--url", "localhost:8000")


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://me:hunter2@127.0.0.1:6379/0", "redis://me:********@127.0.0.1:6379/0"),
        ("redis://:p/ss@127.0.0.1", "redis://:********@127.0.0.1"),
        ("redis://:p@ss@127.0.0.1", "redis://:********@127.0.0.1"),
        ("redis://me:p:s/s@s@127.0.0.1:6379", "redis://me:********@127.0.0.1:6379"),
        ("redis://me@127.0.0.1:6379/0", "redis://me@127.0.0.1:6379/0"),
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://127.0.0.1:6379/0?db=1&password=p@ss:w", "redis://127.0.0.1:6379/0?db=1&password=********"),
        ("redis://host?password=a&db=1&auth_token=b", "redis://host?password=********&db=1&auth_token=********"),
    ],
)
def test_config_show_masks_passwords_of_urls(url: str, masked: str) -> None:
    assert shown("worker", "--redis", url)["redis"]["value"] == masked


def test_errors_about_a_url_have_no_password() -> None:
    with pytest.raises(ConfigError, match=r"--redis redis://me:\*\*\*\*\*\*\*\*@127.0.0.1:port: ") as raised:
        leases_at("redis://me:hunter2@127.0.0.1:port", "namespace")
    assert "hunter2" not in str(raised.value)


def test_config_show_prints_a_table_and_accepts_subcommands() -> None:
    run = forebay("config", "topics", "tail", "--limit", "3")
    assert run.returncode == 0
    (row,) = (line.split() for line in run.stdout.splitlines() if line.startswith("--limit"))
    assert row == ["--limit", "3", "flag"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["upp"], "did you mean up?"),
        (["topics"], "expected a subcommand: create, list, tail"),
        (["topics", "lst"], "did you mean list?"),
        (["up", "--prot", "1"], "did you mean --port?"),
    ],
)
def test_config_show_rejects_unknown_names(arguments: list[str], expected: str) -> None:
    assert expected in error_of("config", *arguments)


MODEL = "forebay-default"
OPTIONS = [
    ("worker", "--namespace", "../x"),
    ("worker", "--id", "a\nb"),
    ("worker", "--pool", "a/b"),
    ("worker", "--model-name", "../x"),
    ("worker", "--lora", MODEL),
    ("ingress", "--namespace", "a\nb"),
    ("ingress", "--lora", MODEL),
    ("router", "--namespace", ""),
    ("router", "--id", "a\0b"),
    ("topics", "--pool", "a/b"),
    ("up", "--model-name", "a\0b"),
    ("up", "--lora", MODEL),
]
OPTIONS_OF_COMMANDS = [(" ".join(path), option) for path, command in commands() for option in options(command)]


@pytest.mark.parametrize(("command", "option", "name"), OPTIONS)
def test_an_option_rejects_an_invalid_name(command: str, option: str, name: str) -> None:
    nobody = ["--kafka", "127.0.0.1:1"] if command != "up" else []
    line = error_of(command, *(["create"] if command == "topics" else []), *nobody, option, name)
    assert option in line
    assert " name " in line
    assert "cannot be used: " in line


def test_options_with_the_same_name_take_the_same_kind_of_value() -> None:
    kinds: dict[str, set[str]] = {}
    for command, option in OPTIONS_OF_COMMANDS:
        if not command.startswith("control policy"):  # its values may also be `none`
            kind = option.type.kind.__name__ if isinstance(option.type, Number) else option.type.name
            kinds.setdefault(option.opts[0], set()).add("text" if kind == "choice" else kind)
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}


def test_options_with_the_same_help_have_the_same_name() -> None:
    names: dict[str, set[str]] = {}
    for _, option in OPTIONS_OF_COMMANDS:
        names.setdefault(option.help or "", set()).add(option.opts[0])
    assert {text: found for text, found in names.items() if len(found) > 1} == {}


def test_the_help_of_every_repeatable_option_says_so() -> None:
    repeatable = [option.multiple for _, option in OPTIONS_OF_COMMANDS]
    assert [bool(re.search(r"\bRepeatable\b", option.help or "")) for _, option in OPTIONS_OF_COMMANDS] == repeatable


BAD = [
    "up --engine nope.py:X",
    "ingress --kafka-config nowhere",
    "ingress --model nope",
    "router --allow-policy nope.Nope",
    "control power pause --url nonsense",
    "produce nowhere",
    "fit nowhere --out profile.toml",
    "workload convert nowhere --out out.jsonl",
    f"topics tail {RECORDING} nope",
    "model alias prod --kafka 127.0.0.1:1",
    "model alias prod m --remove --kafka 127.0.0.1:1",
    "model alias prod m=0 --kafka 127.0.0.1:1",
    "model alias prod m=nan n --kafka 127.0.0.1:1",
    "config nope",
]


@pytest.mark.parametrize("line", BAD)
def test_bad_input_exits_2(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").symlink_to(Path("tests").absolute())
    (tmp_path / "README.md").write_text("# A page\n")
    monkeypatch.chdir(tmp_path)
    run = forebay(*line.split())
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.strip()
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "tests"}


def test_topics_are_listed_as_json() -> None:
    first = forebay("topics", "list", RECORDING, "--json").stdout.splitlines()[0]
    assert first == '{"topic":"control","partition":0,"first":0,"end":1}'


@pytest.mark.parametrize(
    ("extra", "package", "arguments"), [("indexer", "faust", ["indexer"]), ("fit", "scipy", ["fit", "run.db"])]
)
def test_a_missing_extra_is_named_in_one_line(
    extra: str, package: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    run = forebay(*arguments)
    remedy = f"requires the package {package}; install it with: {install_command(extra)}\n"
    assert (run.returncode, run.stderr.endswith(remedy), run.stderr.count("\n")) == (2, True, 1), run.stderr


def test_a_package_that_replaced_itself_when_imported_is_not_missing() -> None:
    import_module("faust")
    extras.require_extra("indexer", "forebay indexer", "faust")
