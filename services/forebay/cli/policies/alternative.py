"""Another configuration than the recorded one: `--set PATH=VALUE`, `--policy`, `--router-policy-config`.

An alternative says what is different in a pool as it was configured on the log; all else stays as it was there, and
goes on changing as it did. Whatever cannot be used is refused in the user's terms before anything is read.
"""

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer
from msgspec import inspect

from forebay.cli.policies.check import add_current_directory, require_policy
from forebay.cli.policies.file import named_fields, read_policy_file, unknown_field
from forebay.cli.policies.router_options import POLICY_CONFIG
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.ingress.errors import Unusable
from forebay.simulate.field_descriptions import allowed_values

SET = "--set"
POLICY = "--policy"
MODE = "router.mode"
CHANGES_MAX = 256  # each is applied to every configuration on the log

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        SET,
        metavar="[POOL:]PATH=VALUE",
        help="Change a field of the pool configuration, such as router.temperature=0.2. Repeatable.",
    ),
]
PolicyOption = Annotated[
    str | None, typer.Option(POLICY, metavar="MODE", help="Router mode, or policy class as module.Class.")
]
PolicyConfigOption = Annotated[
    Path | None,
    typer.Option(
        POLICY_CONFIG, help="Policy file that replaces the recorded configuration. --set and --policy override it."
    ),
]

_ANY_POOL = PoolConfigured(pool="any", model="any", block_size=1)


@dataclass(frozen=True, slots=True)
class Change:
    """One field of the pools' configuration, by its path, and its value. `pool` is empty for all of them."""

    pool: str
    path: str
    value: Any
    text: str  # as the user gave it

    def of(self, pool: PoolConfigured) -> PoolConfigured:
        """A pool's configuration with it; itself when it is of another pool. Raises Unusable."""
        if self.pool not in ("", pool.pool):
            return pool
        try:
            changed: PoolConfigured = _replaced(pool, self.path.split("."), self.value)
        except ValueError as error:
            raise Unusable(f"{self.text}: {error}") from None
        return changed


@dataclass(frozen=True, slots=True)
class Alternative:
    """What is different. `base` takes the place of the whole recorded router configuration, where it is given."""

    changes: tuple[Change, ...]
    base: RouterConfig | None = None
    base_text: str = ""
    base_named: frozenset[str] = frozenset()  # what the file names, as `router.temperature`

    def of(self, pool: PoolConfigured) -> PoolConfigured:
        """The configuration of a pool that has this one on the log."""
        if self.base is not None:
            pool = msgspec.structs.replace(pool, router=self.base)
        return reduce(lambda changed, change: change.of(changed), self.changes, pool)

    def named(self, pool: PoolConfigured) -> Set[str]:
        """The paths of a pool's fields that were given, whatever their values."""
        return self.base_named | {change.path for change in self.changes if change.pool in ("", pool.pool)}

    def require_pools(self, pools: Iterable[PoolConfigured]) -> None:
        """Refuse changes of pools that there are not (Unusable)."""
        known = sorted({pool.pool for pool in pools})
        for change in self.changes:
            if change.pool and change.pool not in known:
                raise Unusable(f"{change.text}: there is no pool {change.pool}; there are {', '.join(known) or 'none'}")

    def idle(self, pools: Iterable[PoolConfigured], undone: Iterable[str] = ()) -> list[str]:
        """What was given and changes nothing of any of these configurations, as the user gave it.

        Paths that are `undone` an operator had set otherwise: giving such a field does change something.
        """
        paths = set(undone)
        configured = list(pools)
        based = [pool if self.base is None else msgspec.structs.replace(pool, router=self.base) for pool in configured]
        idle = self.base is not None and based == configured and not self.base_named & paths
        changes = (change for change in self.changes if change.path not in paths)
        same = [change.text for change in changes if all(change.of(pool) == pool for pool in based)]
        return [self.base_text, *same] if idle else same

    def __str__(self) -> str:
        """What was given, as the user gave it."""
        given = [self.base_text] if self.base is not None else []
        return " ".join(given + [change.text for change in self.changes])


def alternative(sets: list[str] | None, policy: str | None, policy_config: Path | None) -> Alternative:
    """What the options of a command stand for, a policy of the user's tried for determinism.

    Raises Unusable, naming the option, what is wrong with it, and what there is.
    """
    add_current_directory()  # a log may name policies of the user's, too
    changes = [_change(text) for text in sets or ()]
    if policy is not None:
        changes.append(Change("", MODE, policy, f"{POLICY} {policy}"))
    base = None if policy_config is None else read_policy_file(policy_config)
    if not changes and base is None:
        raise Unusable(f"say what is to be different: {SET} PATH=VALUE, {POLICY} MODE or {POLICY_CONFIG} FILE")
    if len(changes) > CHANGES_MAX:
        raise Unusable(f"{SET} is given {len(changes)} times: at most {CHANGES_MAX}; use {POLICY_CONFIG}")
    first: dict[tuple[str, str], Change] = {}
    for change in changes:
        other = first.setdefault((change.pool, change.path), change)
        if other is not change:
            raise Unusable(f"{other.text} and {change.text} are the same field: give one of them")
        if change.path == MODE:
            _require_policy(change.value, change.text)
    if base is not None:
        _require_policy(base.mode, f"{POLICY_CONFIG} {policy_config}")
    named = frozenset() if policy_config is None else frozenset(named_fields(policy_config, "router."))
    return Alternative(tuple(changes), base, f"{POLICY_CONFIG} {policy_config}", named)


def _require_policy(mode: str, given: str) -> None:
    try:
        require_policy(mode)
    except Unusable as error:
        raise Unusable(f"{given}: {error}") from None


def _change(text: str) -> Change:
    """The change that `[POOL:]PATH=VALUE` stands for."""
    given = f"{SET} {text}"
    where, equals, raw = text.partition("=")
    if not equals:
        raise Unusable(f"{given}: must be PATH=VALUE, as router.temperature=0.2")
    pool, _, path = where.rpartition(":")
    kind = FIELDS.get(path)
    if kind is None:
        raise Unusable(f"{given}: {_no_such_field(path)}")
    value = _value(given, kind, raw)
    Change("", path, value, given).of(_ANY_POOL)  # each field has limits of its own, whatever the others say
    return Change(pool, path, value, given)


def _no_such_field(path: str) -> str:
    inside = [name for name in FIELDS if name.startswith(f"{path}.")]
    if path and inside:
        return f"{path} is made of {', '.join(inside)}: set these"
    meant = [name for name in FIELDS if path and name.endswith(f".{path}")]
    if meant:
        return f"unknown field {path}; did you mean {' or '.join(meant)}?"
    return f"unknown field {path or '(none)'}; there are {', '.join(FIELDS)}"


def _value(given: str, kind: Any, raw: str) -> Any:
    """The value of a field, from JSON where it is JSON, else from the text itself."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        value = raw
    unknown = next(unknown_field(value, inspect.type_info(kind)), None)
    if unknown is not None:
        where, known = unknown
        raise Unusable(f"{given}: unknown field {where}; there are {', '.join(known)}")
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        why = f" ({error})" if isinstance(value, list) else ""
        raise Unusable(f"{given}: must be {allowed_values(inspect.type_info(kind))}{why}") from None


def _replaced(part: Any, path: list[str], value: Any) -> Any:
    name, *inner = path
    changed = _replaced(getattr(part, name), inner, value) if inner else value
    return msgspec.structs.replace(part, **{name: changed})


def _fields(kind: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, Any]]:
    """The paths of all fields that are no structs, with their types."""
    for name, field in get_type_hints(kind, include_extras=True).items():
        if isinstance(field, type) and issubclass(field, msgspec.Struct):
            yield from _fields(field, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


# The pool's name, model and block size are what its caches were filled under: another one is another history.
FIELDS: dict[str, Any] = {
    **dict(_fields(RouterConfig, "router.")),
    "attempts_max": get_type_hints(PoolConfigured, include_extras=True)["attempts_max"],
}
