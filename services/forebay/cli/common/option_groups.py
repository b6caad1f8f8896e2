"""Options shared by several commands, as frozen dataclasses. Each field of an option group is one option.

A group with a class attribute `PANEL` has a section of that name in `--help`.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, get_args, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with an option per field of each parameter that is an option group, instead of the group."""
    hints = get_type_hints(command, include_extras=True)
    flags: list[Parameter] = []
    groups: dict[str, type[Any]] = {}
    for name, parameter in signature(command).parameters.items():
        kind = hints[name]
        if isinstance(kind, type) and is_dataclass(kind):
            groups[name] = kind
            flags += options_of(kind).values()
        else:
            flags.append(parameter.replace(annotation=kind, kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def spread_out(**arguments: Any) -> None:
        made = {
            name: kind(**{one.name: arguments.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()
        }
        command(**arguments, **made)

    setattr(spread_out, "__signature__", signature(command).replace(parameters=flags))  # noqa: B010
    spread_out.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return spread_out


def options_of(group: type[Any]) -> Mapping[str, Parameter]:
    """Return the fields of an option group as parameters of a command, by name."""
    hints = get_type_hints(group, include_extras=True)
    return {
        one.name: Parameter(
            one.name, Parameter.KEYWORD_ONLY, default=_default_of(one), annotation=_in_panel(hints[one.name], group)
        )
        for one in fields(group)
    }


def _in_panel(hint: Any, group: type[Any]) -> Any:
    """Return the annotation of an option with the section of its group."""
    panel = getattr(group, "PANEL", None)
    if panel is None:
        return hint
    kind, option = get_args(hint)
    option = copy(option)
    option.rich_help_panel = panel
    return Annotated[kind, option]


def _default_of(option: "Field[Any]") -> Any:
    assert option.default is not MISSING, f"option {option.name} requires a default"
    return option.default
