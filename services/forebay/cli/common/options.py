"""Options and arguments of commands, declared as fields of frozen dataclasses.

The docstring of the class is the help of the command. A field whose type is another dataclass is an option group: each
of its fields is an option of the command, too. Other class attributes describe the command:

- `RUN` names the function that runs it with an instance of the class, as `module:function` relative to `forebay.cli`.
  The module is imported only then, so that `--help` and errors do not wait for it.
- `REQUIRES` names an extra of forebay, and the packages of this extra that the function imports.
- `BASIC` lists the fields that `--help` shows, separated by spaces. `--help-all` shows all of them. Without `BASIC`,
  `--help` does, too.
- `PANEL`, of an option group, names the section of its options in the help.
"""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from forebay.events.names import unknown_name

CommandT = TypeVar("CommandT")


@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of an option, as the metadata of an `Annotated` type.

    The type gives the kind of its values. `bool` is a flag, with a form `--no-` if the default is not False. `Literal`
    has choices, and `list` is repeatable. A field without a default is required.

    Attributes:
        name: name with dashes. Default: name of the field.
        metavar: word for the value in `--help`. Default: by type.
        default_text: description of the default in `--help`, if the field has another default.
        has_variable: whether a variable sets it. Not if other commands give its name another meaning.
    """

    name: str = ""
    _: KW_ONLY
    help: str
    short: str = ""
    metavar: str = ""
    min: float | None = None
    max: float | None = None
    default_text: str = ""
    has_variable: bool = True

    def flag(self, field: str) -> str:
        """Return the name of the option of a field."""
        return self.name or f"--{field.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class Argument:
    """Declaration of a positional argument. `metavar` is by default the name of the field.

    With `takes_options`, the argument also takes options that the command does not have.
    """

    metavar: str = ""
    _: KW_ONLY
    help: str
    takes_options: bool = False


JsonOption = Annotated[bool, Option("--json", help="Print JSON on stdout.")]


class Number(click.ParamType):
    name = "number"

    def __init__(self, kind: type[float], least: float | None, most: float | None) -> None:
        self.kind = kind
        self.least = least
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or raise click.BadParameter with the expected and the given value."""
        try:
            number = self.kind(value)
        except ValueError:
            self.fail(f"expected a valid {'integer' if self.kind is int else 'number'}, got {value}", param, ctx)
        if self.least is not None and not number >= self.least:  # also if it is not a number
            self.fail(f"expected a number greater than or equal to {self.least:.12g}, got {value}", param, ctx)
        if self.most is not None and not number <= self.most:
            self.fail(f"expected a number less than or equal to {self.most:.12g}, got {value}", param, ctx)
        return number

    def bounds(self) -> str:
        """Return the bounds for `--help`; empty if there are none."""
        least, most = (None if one is None else f"{one:.12g}" for one in (self.least, self.most))
        if least is None:
            return "" if most is None else f"at most {most}"
        return f"at least {least}" if most is None else f"{least} to {most}"


class Choice(click.Choice[str]):
    """Choice of an option, with suggestions for an unknown value."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            self.fail(unknown_name("value", str(value), self.choices), param, ctx)
        return str(value)


class CliOption(click.Option):
    """Option of a command, in the section `panel` of `--help`. A variable sets it if it `has_variable`."""

    def __init__(self, names: list[str], *, panel: str, has_variable: bool = True, **settings: Any) -> None:
        super().__init__(names, **settings)
        self.panel = panel
        self.has_variable = has_variable

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return the default, the bounds, and whether the option is required."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.type, Number) and (bounds := self.type.bounds()):
            extra["range"] = bounds
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default
        return extra


class CliArgument(click.Argument):
    def __init__(self, name: str, *, help_text: str, **settings: Any) -> None:
        super().__init__([name], **settings)
        self.help = help_text

    def make_metavar(self, ctx: click.Context) -> str:
        """Return the word for the value. A word such as `[LOG] OUT` shows itself which parts are optional."""
        word = self.metavar or (self.name or "").upper()
        if {" ", "."} & set(word):
            return word
        return (word if self.required else f"[{word}]") + "..." * (self.nargs != 1)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return self.make_metavar(ctx), self.help


def parameters_of(declared: type[Any]) -> Iterator[click.Parameter]:
    """Yield the options and arguments of a command or an option group. Arguments keep the order of their fields."""
    hints = get_type_hints(declared, include_extras=True)
    for one in fields(declared):
        hint = hints[one.name]
        if is_dataclass(hint):
            yield from parameters_of(hint)  # type: ignore[arg-type]  # no instance
            continue
        assert get_origin(hint) is Annotated, f"{declared.__name__}.{one.name} is not declared"
        kind, declaration = get_args(hint)
        default = None if one.default is MISSING else one.default
        required = one.default is MISSING
        if isinstance(declaration, Argument):
            yield _argument(one.name, kind, declaration, default, required=required)
        else:
            yield _option(one.name, kind, declaration, default, getattr(declared, "PANEL", ""), required=required)


def declarations_of(declared: type[Any]) -> dict[str, Any]:
    """Return the declaration of each option and argument of an option group by the name of its field."""
    hints = get_type_hints(declared, include_extras=True)
    return {one.name: get_args(hints[one.name])[1] for one in fields(declared)}


def built(declared: type[CommandT], values: Mapping[str, Any]) -> CommandT:
    """Return an instance of a command or an option group from the values of its parameters by name."""
    hints = get_type_hints(declared)
    return declared(
        **{
            one.name: built(hints[one.name], values) if is_dataclass(hints[one.name]) else _value(values[one.name])
            for one in fields(declared)  # type: ignore[arg-type]  # any dataclass
        }
    )


def function_of(declared: type[Any]) -> Any:
    module, _, name = declared.RUN.partition(":")
    return getattr(import_module(f"forebay.cli.{module}"), name)


def _value(value: Any) -> Any:
    """Return the values of a repeatable parameter as a list, None if there are none."""
    return (list(value) or None) if isinstance(value, tuple) else value


def _argument(name: str, kind: Any, declaration: Argument, default: Any, *, required: bool) -> CliArgument:
    inner, is_list = _inner(kind)
    return CliArgument(
        name,
        help_text=declaration.help,
        metavar=declaration.metavar or None,
        required=required,
        **_default(None if is_list else default, required=required),
        nargs=-1 if is_list else 1,
        type=click.UNPROCESSED if declaration.takes_options else _type(inner, None, None),
    )


def _option(name: str, kind: Any, declaration: Option, default: Any, panel: str, *, required: bool) -> CliOption:
    flag = declaration.flag(name)
    inner, is_list = _inner(kind)
    is_flag = inner is bool
    negation = f"/--no-{flag[2:]}" if is_flag and default is not False and "/" not in flag else ""
    return CliOption(
        [name, flag + negation, *([declaration.short] if declaration.short else [])],
        panel=panel,
        has_variable=declaration.has_variable,
        help=declaration.help,
        required=required,
        **_default(default, required=required),
        show_default=declaration.default_text or default not in (False, ""),
        multiple=is_list,
        is_flag=is_flag,
        type=click.BOOL if is_flag else _type(inner, declaration.min, declaration.max),
        metavar=None if is_flag else declaration.metavar or _metavar(flag, inner),
    )


def _default(default: Any, *, required: bool) -> dict[str, Any]:
    """Return the setting `default` for click. With one, even None, click never misses a required value."""
    return {} if required else {"default": default}


def _inner(kind: Any) -> tuple[Any, bool]:
    """Return the type of one value, and whether there may be several."""
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (one for one in get_args(kind) if one is not NoneType)
    return (get_args(kind)[0], True) if get_origin(kind) is list else (kind, False)


def _type(kind: Any, least: float | None, most: float | None) -> click.ParamType:
    if get_origin(kind) is Literal:
        return Choice(get_args(kind))
    if kind in (int, float):
        return Number(kind, least, most)
    return click.Path(path_type=Path) if kind is Path else click.STRING


def _metavar(flag: str, kind: Any) -> str | None:
    if kind in (int, float) and flag.endswith(("-s", "-secs")):
        return "SECONDS"
    return {Path: "PATH", str: "TEXT", int: "N", float: "NUMBER"}.get(kind)
