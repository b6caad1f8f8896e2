"""Command classes of the command line: environment variables, help sections and suggestions for all commands."""

import os
import re
from ast import literal_eval
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from forebay.cli.common.errors import USAGE, complain
from forebay.events.names import unknown_name

PREFIX = "FOREBAY_"
EPILOG = "Environment variables set options, too: FOREBAY_PORT for --port, and so on. See docs/configuration.md."
SECRETS = frozenset({"key", "keys", "token", "password", "secret"})  # last words of option names
SERVICE_OPTIONS = frozenset({"engine", "lora", "model", "policy", "pool", "timeout-s", "worker"})
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")  # start of the address that Kubernetes sets as NAME_PORT for a Service
NO_CHOICE = re.compile(r"Value error, (?P<value>'.*'|\".*\") is not one of (?P<choices>.*)\.", re.DOTALL)
EXPECTATION = re.compile(r"Input should be (?P<text>[^,]*)")  # start of a message of pydantic
TYPE = re.compile(r" <[^>]*>$")  # typer's type behind the name of an argument
METAVARS = {
    "Path": "PATH",
    "str": "TEXT",
    "int": "N",
    "float": "NUMBER",
}  # typer would write <int range>, <list[str]>, ...
SENTENCE_CHARS_MAX = 200
UNSET = ("ENVIRONMENT", "DEFAULT_MAP")  # sources of options that the command line does not contain


def long_name(param: Any) -> str:
    """Return the name of an option without dashes at its start. Empty if `param` has no long name."""
    if param.param_type_name != "option":
        return ""
    return next((name.removeprefix("--") for name in param.opts if name.startswith("--")), "")


def is_secret(name: str) -> bool:
    """Return whether no output may contain the value of the option with this name."""
    return name.rpartition("-")[2] in SECRETS


def variable(name: str) -> str:
    """Return the environment variable of an option, for example FOREBAY_KV_EVENTS for `kv-events`."""
    return PREFIX + name.upper().replace("-", "_")


def source_of(context: Any, param: Any) -> str:
    """Return where the value of a parameter comes from: `flag`, `variable`, `file` or `default`."""
    found = context.get_parameter_source(param.name)
    names = {"COMMANDLINE": "flag", "ENVIRONMENT": "variable", "DEFAULT_MAP": "file"}
    return names.get(found.name if found is not None else "", "default")


def _add_metavar(param: Any) -> None:
    """Set the word for a value in the help, for example SECONDS, unless the option or argument has one."""
    if param.metavar is None and param.param_type_name == "argument":
        param.metavar = param.name.upper()
    if param.metavar is None and param.param_type_name == "option" and not param.is_flag:
        kind = param.bare_type().removeprefix("list[").removesuffix("]")
        is_time = kind in ("int", "float") and long_name(param).endswith(("-s", "-secs"))
        param.metavar = "SECONDS" if is_time else METAVARS.get(kind)


class CliCommand(TyperCommand):
    """Command whose options can be set by environment variables, with help in sections.

    SERVICE_OPTIONS have variables only in services, because other commands give these names another meaning or use them
    to limit a command to some workers. An option that the command line does not contain takes its value from its
    variable, then from the file of --config, then from its default.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        names = {long_name(param) for param in self.params}
        without = frozenset() if "config" in names else SERVICE_OPTIONS  # only services have --config
        for param in self.params:
            _add_metavar(param)
            if (name := long_name(param)) and name not in without and not getattr(param, "hidden", False):
                param.envvar = variable(name)
                setattr(param, "show_envvar", False)  # noqa: B010 - the name follows a rule, which the epilog states

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. An error names the variable or the key of the file that has the invalid value."""
        self._drop_service_links()
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            has_value = reword_value_error(error)
            if error.param is not None and (place := place_of(ctx, error.param)):
                error.param_hint = place
                error.message += "" if has_value else f"; got {os.environ.get(place, '')}"
            raise
        except Exception as error:
            if hasattr(error, "possibilities"):
                _suggest_option(error, self.get_params(ctx))
            raise
        _resolve_source(ctx)
        return rest

    def _drop_service_links(self) -> None:
        """Remove the variables of ports that Kubernetes has set, also for the processes that this command starts."""
        for name in (str(param.envvar) for param in self.params if param.envvar):
            if name.endswith("_PORT") and SERVICE_LINK.match(os.environ.get(name, "")):
                value = os.environ.pop(name)
                complain(f"ignored {name}={value}, a service link of Kubernetes; set enableServiceLinks: false")

    def invoke(self, ctx: Any) -> Any:
        """Run the command. After a usage error, name the options that variables or the file have set."""
        try:
            return super().invoke(ctx)
        except typer.Exit as ended:
            if ended.exit_code == USAGE:
                for param in self.get_params(ctx):
                    if ctx.params.get(param.name) is not None and (place := place_of(ctx, param)):
                        complain(f"note: --{long_name(param)} is set by {place}")
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line. An argument whose name shows its parts, as `[LOG] OUT`, has no braces."""
        pieces = [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]
        return [piece.removesuffix("...") if " " in piece else piece for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options, in one section per panel. Options without a panel are first."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                record = (TYPE.sub("", record[0]), record[1]) if param.param_type_name == "argument" else record
                plain = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(param, "rich_help_panel", None) or plain, []).append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


class CliGroup(TyperGroup):
    """Group of commands that suggests similar names for an unknown command."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the first sentence of each command's help, on several lines if it is long."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, one.get_short_help_str(SENTENCE_CHARS_MAX)) for name, one in self.commands.items()]
            )

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the name of the command, the command itself, and its arguments."""
        if args and args[0] not in self.commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            ctx.fail(unknown_name("command", args[0], self.commands))
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments up to the name of the command."""
        for param in self.get_params(ctx):
            if getattr(param, "is_flag", False) and param.default is None:
                param.default = False  # typer would import pydantic to convert None, which takes 100 ms
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "possibilities"):
                _suggest_option(error, self.get_params(ctx))
            raise


def place_of(ctx: Any, param: Any) -> str:
    """Return the variable, or the key and the file, that sets an option. Empty if none of them does."""
    source = source_of(ctx, param)
    if source == "variable":
        return str(param.envvar)
    return f"{long_name(param)} in {ctx.params.get('config')}" if source == "file" else ""


def reword_value_error(error: typer.BadParameter) -> bool:
    """State the invalid value and the expectation in an error of pydantic, or suggest similar choices.

    Returns whether it is such an error.
    """
    if choice := NO_CHOICE.fullmatch(error.message):
        value, *choices = literal_eval(f"{choice['value']}, {choice['choices']}")
        error.message = unknown_name("value", value, choices)
        return True
    details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    limit = EXPECTATION.match(error.message)
    if not details or limit is None:
        return False
    expected = f"a number {limit['text']}" if limit["text"].startswith(("less", "greater")) else limit["text"]
    error.message = f"expected {expected}, got {details[0]['input']}"
    return True


def _suggest_option(error: Any, params: Iterable[Any]) -> None:
    known = [name for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("--")]
    error.possibilities = None
    error.message = unknown_name("option", error.option_name, known)


def _resolve_source(ctx: Any) -> None:
    """Ignore the Kafka of a variable or a file if the command line has a log file or a URL: they exclude each other."""
    kafka, url = (getattr(ctx.get_parameter_source(name), "name", "") for name in ("kafka", "url"))
    has_log = ctx.params.get("log") is not None or len(ctx.params.get("where") or ()) > 1
    has_url = "kafka" in ctx.params and url == "COMMANDLINE"
    if has_url and (has_log or kafka == "COMMANDLINE") and not ctx.resilient_parsing:
        ctx.fail(f"--url and {'a log file' if has_log else '--kafka'} exclude each other: expected one of them")
    if (has_log or has_url) and kafka in UNSET:
        ctx.params["kafka"] = None


MASK = "********"
PARAMETER = re.compile(rf"([?&][^=&]*(?:{'|'.join(sorted(SECRETS))})=)[^&#]*", re.IGNORECASE)
PASSWORD = re.compile(r"(?<=://)([^:]*):.*@", re.DOTALL)  # greedy, because a password may contain / and @


def without_passwords(text: str) -> str:
    """Return text with masked passwords: those before the host of a URL, and query parameters with such a name."""
    if "://" in text:
        text = PARAMETER.sub(rf"\1{MASK}", text)
    return PASSWORD.sub(rf"\1:{MASK}@", text)
