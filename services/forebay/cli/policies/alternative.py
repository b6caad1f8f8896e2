"""Options that change the recorded configuration: `--set PATH=VALUE`, `--policy`, `--policy-config`.

An alternative changes some fields of the pool configurations on the log. All other fields keep their recorded values,
including changes that were recorded later. The options are checked before the log is read.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import msgspec

from forebay.cli.common.options import Option
from forebay.cli.policies.allowed import require_policy
from forebay.cli.policies.file import named_fields, read_policy_file
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.names import unknown_name
from forebay.runtime.errors import ConfigError, prefixed
from forebay.simulate.field_descriptions import converted, field_types, with_field

SET = "--set"
POLICY = "--policy"
POLICY_CONFIG = "--policy-config"
MODE = "mode"
CHANGES_MAX = 256  # each change is applied to every configuration on the log

_ANY_POOL = PoolConfigured(pool="any", model="any", block_size=1)


@dataclass(frozen=True, slots=True)
class Change:
    """New value for one field of pool configurations, from `--set` or `--policy`.

    Attributes:
        pool: empty for all pools.
        path: path of the field in the router configuration, such as `temperature`, or a name in POOL_FIELDS.
        text: the option as the user wrote it, for messages.
    """

    pool: str
    path: str
    value: Any
    text: str

    def of(self, pool: PoolConfigured) -> PoolConfigured:
        """Return the configuration of a pool with this change, if it applies there. Raises ConfigError if invalid."""
        if self.pool not in ("", pool.pool):
            return pool
        with prefixed(self.text):
            if self.path in POOL_FIELDS:
                return msgspec.structs.replace(pool, **{self.path: self.value})
            router = with_field(pool.router, self.path, self.value)
            return msgspec.structs.replace(pool, router=router)


@dataclass(frozen=True, slots=True)
class Alternative:
    """Changed configuration that a command compares with the recorded one.

    Attributes:
        changes: fields to change, after `base` was applied.
        base: router configuration that replaces the recorded one; None keeps the recorded one.
        base_text: the option that names `base`, for messages.
        base_named: paths of the fields that the file of `base` contains.
    """

    changes: tuple[Change, ...]
    base: RouterConfig | None = None
    base_text: str = ""
    base_named: frozenset[str] = frozenset()

    def of(self, pool: PoolConfigured) -> PoolConfigured:
        if self.base is not None:
            pool = msgspec.structs.replace(pool, router=self.base)
        return reduce(lambda changed, change: change.of(changed), self.changes, pool)

    @property
    def modes(self) -> list[str]:
        return [change.value for change in self.changes if change.path == MODE] + (
            [] if self.base is None else [self.base.mode]
        )

    def named(self, pool: PoolConfigured) -> Set[str]:
        """Return the paths of the fields that the options set for a pool."""
        return self.base_named | {change.path for change in self.changes if change.pool in ("", pool.pool)}

    def require_pools(self, pools: Iterable[PoolConfigured]) -> None:
        """Raise ConfigError if a change names a pool that is not among `pools`."""
        known = sorted({pool.pool for pool in pools})
        for change in self.changes:
            if change.pool and change.pool not in known:
                raise ConfigError(f"{change.text}: {unknown_name('pool', change.pool, known)}")

    def idle(self, pools: Iterable[PoolConfigured], undone: Iterable[str] = ()) -> list[str]:
        """Return the options that have no effect, because they equal the recorded configuration of `pools`.

        An option for a field in `undone`, which an operator changed at run time, always has an effect.
        """
        paths = set(undone)
        configured = list(pools)
        based = [pool if self.base is None else msgspec.structs.replace(pool, router=self.base) for pool in configured]
        idle = self.base is not None and based == configured and not self.base_named & paths
        changes = (change for change in self.changes if change.path not in paths)
        same = [change.text for change in changes if all(change.of(pool) == pool for pool in based)]
        return [self.base_text, *same] if idle else same

    def __str__(self) -> str:
        """Return the options as the user wrote them."""
        given = [self.base_text] if self.base is not None else []
        return " ".join(given + [change.text for change in self.changes])


@dataclass(frozen=True, slots=True)
class AlternativeOptions:
    sets: Annotated[
        list[str] | None,
        Option(
            SET,
            metavar="[POOL:]PATH=VALUE",
            help="Change a field of the router configuration, such as temperature=0.2. Repeatable.",
        ),
    ] = None
    policy: Annotated[
        str | None,
        Option(POLICY, metavar="MODE", help="Change the router mode: a mode, or a policy class as module.Class."),
    ] = None
    policy_config: Annotated[
        Path | None,
        Option(
            POLICY_CONFIG, help="Policy file that replaces the recorded configuration. --set and --policy override it."
        ),
    ] = None

    def alternative(self) -> Alternative:
        """Return the alternative. Raises ConfigError if an option is invalid, or none is given."""
        changes = [_change(text) for text in self.sets or ()]
        if self.policy is not None:
            changes.append(Change("", MODE, self.policy, f"{POLICY} {self.policy}"))
        base = None if self.policy_config is None else read_policy_file(self.policy_config)
        if not changes and base is None:
            raise ConfigError(f"no change; pass {SET} PATH=VALUE, {POLICY} MODE or {POLICY_CONFIG} FILE")
        if len(changes) > CHANGES_MAX:
            raise ConfigError(
                f"{len(changes)} changes by {SET} exceed the maximum of {CHANGES_MAX}; use {POLICY_CONFIG}"
            )
        first: dict[tuple[str, str], Change] = {}
        for change in changes:
            other = first.setdefault((change.pool, change.path), change)
            if other is not change:
                raise ConfigError(f"{other.text} and {change.text} set the same field; pass one of them")
            if change.path == MODE:
                _require_policy(change.value, change.text)
        text = f"{POLICY_CONFIG} {self.policy_config}"
        if base is not None:
            _require_policy(base.mode, text)
        named = frozenset() if self.policy_config is None else frozenset(named_fields(self.policy_config))
        return Alternative(tuple(changes), base, text, named)


def _require_policy(mode: str, given: str) -> None:
    with prefixed(given):
        require_policy(mode)


def _change(text: str) -> Change:
    """Parse `[POOL:]PATH=VALUE`. The value is JSON, or else a string."""
    given = f"{SET} {text}"
    where, equals, raw = text.partition("=")
    if not equals:
        raise ConfigError(f"{given}: expected PATH=VALUE, for example temperature=0.2")
    pool, _, path = where.rpartition(":")
    kind = FIELDS.get(path)
    if kind is None:
        raise ConfigError(f"{given}: {_no_such_field(path)}")
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        value = raw
    with prefixed(given):
        value = converted(value, kind, "field", strict=False)
    Change("", path, value, given).of(_ANY_POOL)  # check the limits of this field alone
    return Change(pool, path, value, given)


def _no_such_field(path: str) -> str:
    inside = [name for name in FIELDS if name.startswith(f"{path}.")]
    if path and inside:
        return f"{path} is a group of fields; set one of {', '.join(inside)}"
    return unknown_name("field", path, FIELDS)


# A pool's name, model and block size cannot change, because the recorded caches depend on them.
POOL_FIELDS = {"attempts_max": dict(field_types(PoolConfigured))["attempts_max"]}
FIELDS: dict[str, Any] = dict(field_types(RouterConfig)) | POOL_FIELDS
