"""Commands on click: environment variables and the file of `--config`, help in sections, and suggestions."""

import ast
import os
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click

from forebay.cli.common.config_file import SERVICES, config_option
from forebay.cli.common.errors import USAGE
from forebay.cli.common.extras import require_extra
from forebay.cli.common.options import CliOption, built, function_of, parameters_of
from forebay.cli.common.sources import long_name, place_of, variable
from forebay.events.names import unknown_name
from forebay.processes.notices import complain

EPILOG = "Environment variables set options, too: FOREBAY_PORT for --port, and so on. See docs/configuration.md."
SERVICE_OPTIONS = frozenset((
    "all", "engine", "from", "lora", "model", "policy", "pool", "pool-routing", "remove", "set", "timeout-s", "to",
    "worker", "yes",
))  # fmt: skip
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")  # start of the address that Kubernetes sets as NAME_PORT for a Service
INTERRUPTED = 130  # exit code after Ctrl-C, as of a shell
ALL = "forebay.help_all"  # key of the context
UNSET = ("ENVIRONMENT", "DEFAULT_MAP")  # sources of options that the command line does not contain


class Subcommands(NamedTuple):
    """Group of commands below one name: the declaration of each, as `module:Class` relative to `forebay.cli`.

    Arguments that do not begin with a command of the group are those of `default`, unless it is empty.
    """

    help: str
    commands: Mapping[str, str]
    default: str = ""


class CliCommand(click.Command):
    """Command of a dataclass.

    An option that the command line does not contain takes its value from its environment variable, then from the file
    of --config, then from its default. SERVICE_OPTIONS have variables only in services, because other commands give
    these names another meaning, use them to limit a command to some workers, or change or remove something by them.
    """

    def __init__(self, name: str, declared: type[Any], path: str) -> None:
        params = list(parameters_of(declared))
        is_service = path in SERVICES
        if is_service:
            params.append(config_option(path))
        super().__init__(name, params=params, help=declared.__doc__, epilog=EPILOG if is_service else None)
        self.declared = declared
        self.basic: list[str] = getattr(declared, "BASIC", "").split()
        if any(one.type is click.UNPROCESSED for one in params):
            self.context_settings = {"ignore_unknown_options": True}
        if self.basic:
            text = "Show all options and exit."
            params.append(
                CliOption(
                    ["--help-all"],
                    panel="",
                    help=text,
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_show_all,
                )
            )
        without = frozenset() if is_service else SERVICE_OPTIONS
        for param in params:
            if (option := long_name(param)) and option not in without and getattr(param, "has_variable", True):
                param.envvar = variable(option)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. An error names the variable or the key of the file that has the invalid value."""
        self._drop_service_links()
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            if error.param is not None and (place := place_of(ctx, error.param)):
                error.param_hint = place
            raise
        except click.NoSuchOption as error:
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

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. After a usage error, name the options that variables or the file have set."""
        try:
            if requires := getattr(self.declared, "REQUIRES", ()):
                extra, *packages = requires
                require_extra(extra, ctx.command_path, *packages)
            return function_of(self.declared)(built(self.declared, ctx.params))
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None
        except click.exceptions.Exit as ended:
            if ended.exit_code == USAGE:
                for param in self.get_params(ctx):
                    if ctx.params.get(param.name or "") is not None and (place := place_of(ctx, param)):
                        complain(f"note: --{long_name(param)} is set by {place}")
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments and options, in one section per panel. Options without a panel are first."""
        shows_all = not self.basic or ctx.meta.get(ALL, False)
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        omitted = 0
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if isinstance(param, click.Argument):
                sections["Arguments"].append(record)
            elif shows_all:
                sections.setdefault(getattr(param, "panel", "") or "Options", []).append(record)
            elif param.name in (*self.basic, "help", "help_all"):
                sections["Options"].append(record)
            else:
                omitted += 1
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
        if omitted:
            formatter.write_paragraph()
            formatter.write_text(f"`{ctx.command_path} --help-all` shows {omitted} more options.")


class CliGroup(click.Group):
    """Group of commands, which imports only the declaration of the command that it runs."""

    def __init__(
        self,
        name: str,
        text: str,
        sections: Mapping[str, Mapping[str, str | Subcommands]],
        default: str = "",
        **settings: Any,
    ) -> None:
        super().__init__(name, help=text, no_args_is_help=True, **settings)
        self.sections = sections
        self.default = default
        self.table = {one: entry for section in sections.values() for one, entry in section.items()}
        self.path = "" if "epilog" in settings else f"{name}-"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and (entry := self.table.get(cmd_name)) is not None:
            if isinstance(entry, Subcommands):
                self.commands[cmd_name] = CliGroup(cmd_name, entry.help, {"Commands": entry.commands}, entry.default)
            else:
                module, _, name = entry.partition(":")
                declared = getattr(import_module(f"forebay.cli.{module}"), name)
                self.commands[cmd_name] = CliCommand(cmd_name, declared, self.path + cmd_name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first sentence of each command's help, in sections."""
        for section, entries in self.sections.items():
            with formatter.section(section):
                formatter.write_dl([(name, summary(entry)) for name, entry in entries.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.table and not args[0].startswith("-") and not ctx.resilient_parsing:
            ctx.fail(unknown_name("command", args[0], self.table))
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments up to the name of the command."""
        if self.default and args and args[0] not in (*self.table, *self.get_help_option_names(ctx)):
            args = [self.default, *args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            _suggest_option(error, self.get_params(ctx))
            raise


def summary(entry: str | Subcommands) -> str:
    """Return the first line of a command's help. The declaration is not imported, because all take 150 ms."""
    if isinstance(entry, Subcommands):
        return entry.help
    module, _, name = entry.partition(":")
    found = find_spec(f"forebay.cli.{module}")
    assert found is not None and found.origin is not None, entry
    tree = ast.parse(Path(found.origin).read_text("utf-8"))
    (declared,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name)
    return (ast.get_docstring(declared) or "").partition("\n")[0]


def _show_all(ctx: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not ctx.resilient_parsing:
        ctx.meta[ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _suggest_option(error: click.NoSuchOption, params: Iterable[click.Parameter]) -> None:
    known = [name for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("--")]
    error.possibilities = None
    error.message = unknown_name("option", error.option_name, known)


def _resolve_source(ctx: click.Context) -> None:
    """Ignore the Kafka of a variable or a file if the command line has a log file or a URL: they exclude each other."""
    kafka, url = (getattr(ctx.get_parameter_source(name), "name", "") for name in ("kafka", "url"))
    has_log = ctx.params.get("log") is not None or len(ctx.params.get("where") or ()) > 1
    has_url = "kafka" in ctx.params and url == "COMMANDLINE"
    if has_url and (has_log or kafka == "COMMANDLINE") and not ctx.resilient_parsing:
        ctx.fail(f"--url and {'a log file' if has_log else '--kafka'} exclude each other: expected one of them")
    if (has_log or has_url) and kafka in UNSET:
        ctx.params["kafka"] = None
