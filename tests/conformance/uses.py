"""Check what forebay's adapters use of an engine against the interface of its package.

Theory of operation. The source of an adapter is read as a tree. Imports and annotations give the engine's classes, and
`Adapter.receivers` the classes of objects that the engine returns. From these, the reader follows attributes, calls and
subclasses. An unused entry of `receivers` is an error, so the table cannot become outdated.
"""

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tests.conformance.interface import Package, Recording, Signature

Engine = Package | Recording
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Adapter:
    """What the tests know about an adapter beside its source. Names are those of `Package`.

    Attributes:
        receivers: classes by expression, or by `function:expression`. A leading `=` means the object itself.
        bases: classes that have the methods of a class of the engine without being subclasses of it.
        calls: method that calls a method of another expression by its name.
        keywords: names of arguments, by class, function or `class.method`.
        strings: strings that must exist, by module.
        events: module of the engine's KV events, forebay's decoders of them, and fields that forebay ignores.
    """

    package: str = ""
    files: Sequence[Path] = ()
    receivers: Mapping[str, str] = field(default_factory=dict)
    bases: Mapping[str, str] = field(default_factory=dict)
    calls: tuple[str, str] = ("", "")
    keywords: Sequence[tuple[str, Collection[str]]] = ()
    strings: Mapping[str, Collection[str]] = field(default_factory=dict)
    events: tuple[str, Sequence[type[msgspec.Struct]], Collection[str]] = ("", (), ())


def differences(adapter: Adapter, engine: Engine) -> list[str]:
    """Return the differences between what an adapter uses and what its engine has, one line each."""
    found: list[str] = []
    used: set[str] = set()
    for path in adapter.files:
        _Reader(adapter, engine, path, found, used).visit(ast.parse(path.read_bytes()))
    found += [f"unused receiver in the table: {one}" for one in sorted(adapter.receivers.keys() - used)]
    for name, keywords in adapter.keywords:
        owner, _, method = name.rpartition(".") if "." in name.partition(":")[2] else (name, "", "")
        known = engine.interface(owner)
        call = known and (known.members.get(method) if method else known.call)
        found += _missing(call, keywords, name) if isinstance(call, Signature) else [f"{name} does not exist"]
    for module, wanted in adapter.strings.items():
        found += [f"{module} does not contain {one!r}" for one in sorted(set(wanted) - engine.strings(module))]
    module, decoders, ignored = adapter.events
    read = {str(one.__struct_config__.tag): set(one.__struct_fields__) for one in decoders}
    kinds = engine.interface(f"{module}:KVCacheEvent*")
    found += [f"{module} has a new event: {one}" for one in (kinds.members if kinds else ()) if one not in read]
    for event, ours in read.items():
        known = engine.interface(f"{module}:{event}")
        fields = set(known.call.arguments if known else ())
        found += [f"{module}:{event} has no field {one}" for one in sorted(ours - fields)]
        found += [f"{module}:{event} has a new field: {one}" for one in sorted(fields - ours - set(ignored))]
    return list(dict.fromkeys(found))


def offered(engine: Engine, name: str, standin: ast.ClassDef, own: Collection[str]) -> list[str]:
    """Return what a stand-in has and the class of its engine has not. `own` are methods with which tests control it."""
    known = engine.interface(name)
    found = [] if known else [f"{name} does not exist"]
    for node in standin.body if known else ():
        if isinstance(node, Function) and node.name not in own and node.name[0] != "_":
            member = known.members.get(node.name)  # type: ignore[union-attr]
            found += [f"{name} has no {node.name}"] if member is None else []
            if isinstance(member, Signature) and not (node.args.kwarg and len(node.args.args) == 1):
                found += _overridden(member, node, f"{name}.{node.name}", is_caller=True)
    return found


class _Reader(ast.NodeVisitor):
    def __init__(self, adapter: Adapter, engine: Engine, path: Path, found: list[str], used: set[str]) -> None:
        self._adapter, self._engine, self._found, self._used = adapter, engine, found, used
        self._file = f"{path.parent.name}/{path.name}"
        self._env: dict[str, str | None] = {}  # classes by expression, as in `Adapter.receivers`
        self._function = ""
        self._types: dict[ast.AST, str | None] = {}

    def _report(self, node: Any, *texts: str) -> None:
        self._found += [f"{self._file}:{node.lineno}: {one}" for one in texts]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for one in node.names if (node.module or "").split(".")[0] == self._adapter.package else ():
            name = f"{node.module}:{one.name}"
            self._env[one.asname or one.name] = f"={name}"
            if name in self._adapter.receivers:  # of older releases
                self._used.add(name)
            elif self._engine.interface(name) is None:
                self._report(node, f"{name} does not exist")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = dict(self._env)
        inherited = next((kind[1:] for kind in map(self._type, node.bases) if kind), "")
        base = inherited or self._adapter.bases.get(node.name, "")
        if known := self._engine.interface(base):
            methods = {one.name: one for one in node.body if isinstance(one, Function)}
            for name, method in methods.items():
                member = known.members.get(name)
                if isinstance(member, Signature) and name != "__init__":
                    self._report(method, *_overridden(member, method, f"{base}.{name}", is_caller=False))
                elif member is None and name[0] != "_":
                    self._report(method, f"{base} has no {name}")
            self._report(
                node, *(f"{base} has a new abstract method: {one}" for one in known.abstract if one not in methods)
            )
            self._env |= {"super()": base, "self": inherited or None} | {f"self.{one}": None for one in methods}
            stored = [
                one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
            ]
            self._env |= {f"self.{one.attr}": None for one in stored}
        elif base:
            self._report(node, f"{base} does not exist")
        self.generic_visit(node)
        self._env = before

    def visit_FunctionDef(self, node: Any) -> None:
        before, self._env, outer, self._function = self._env, dict(self._env), self._function, node.name
        for one in (*node.args.args, *node.args.kwonlyargs):
            kind = self._env.get(ast.unparse(one.annotation).strip("'")) if one.annotation else None
            self._env |= {} if one.arg == "self" else {one.arg: kind and kind.removeprefix("=")}
        self.generic_visit(node)
        self._env, self._function = before, outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        self._env |= {one.id: self._type(node.value) for one in node.targets if isinstance(one, ast.Name)}

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._env[node.target.id] = self._type(node.value)

    def visit_Attribute(self, node: Any) -> None:
        self._type(node)
        self.generic_visit(node)

    visit_Call = visit_Attribute  # noqa: N815

    def _type(self, node: ast.expr) -> str | None:
        if node not in self._types:
            self._types[node] = self._typed(node)
        return self._types[node]

    def _typed(self, node: ast.expr) -> str | None:
        text = ast.unparse(node)
        for key in (f"{self._function}:{text}", text):
            if key in self._adapter.receivers:
                self._used.add(key)
                if isinstance(node, ast.Call):
                    self._call(node)
                return self._adapter.receivers[key] or None
        if text in self._env:
            return self._env[text]
        match node:
            case ast.Await(value=value):
                return self._type(value)
            case ast.Attribute(value=value, attr=name):
                return self._member(node, self._type(value), name)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[value, ast.Constant(value=str(name)), *_]):
                return self._member(node, self._type(value), name)
            case ast.Call():
                return self._call(node)
        return None

    def _member(self, node: ast.expr, kind: str | None, name: str) -> str | None:
        kind = kind or ""
        if kind.startswith("=") and ":" not in kind:  # a module
            if self._engine.interface(f"{kind[1:]}:{name}") is None:
                self._report(node, f"{kind[1:]}:{name} does not exist")
            return f"{kind}:{name}"
        known = self._engine.interface(kind.removeprefix("="))
        if known is not None and name not in known.members and name[:2] != "__":
            self._report(node, f"{kind.removeprefix('=')} has no {name}")
        member = known.members.get(name) if known is not None else None
        return member if isinstance(member, str) and member else None

    def _call(self, node: ast.Call) -> str | None:
        called, arguments = node.func, node.args
        member: Signature | str | None
        if ast.unparse(called) == self._adapter.calls[0] and isinstance(arguments[0], ast.Constant):
            owner = ast.parse(self._adapter.calls[1], mode="eval").body
            called = ast.Attribute(owner, str(arguments[0].value), lineno=node.lineno)
            arguments = arguments[1:]
        kind, member, name = self._type(called) or "", "", ""
        if kind.startswith("="):
            known, name = self._engine.interface(kind[1:]), kind[1:]
            member = known.call if known else None
        elif isinstance(called, ast.Attribute) and (owner_type := self._type(called.value)):
            known, name = self._engine.interface(owner_type.removeprefix("=")), f"{owner_type}.{called.attr}"
            member = known.members.get(called.attr) if known else None
        if isinstance(member, Signature):
            given = [one.arg for one in node.keywords if one.arg]
            is_partial = len(given) < len(node.keywords) or any(isinstance(one, ast.Starred) for one in arguments)
            self._report(node, *_missing(member, given, name, None if is_partial else len(arguments)))
        return kind[1:] if kind.startswith("=") and ":" in kind else None


def _missing(call: Signature, keywords: Collection[str], name: str, positional: int | None = None) -> list[str]:
    """Return the arguments that do not exist, and unless `positional` is None, the required ones that are not given."""
    found = [f"{name} has no argument {one}" for one in keywords if one not in call.arguments and not call.is_open]
    if positional is not None:
        given = {*list(call.arguments)[:positional], *keywords}
        found += [f"{name} requires {one}" for one, is_due in call.arguments.items() if is_due and one not in given]
        if positional > len(call.arguments) and not call.is_open:
            found.append(f"{name} takes {len(call.arguments)} arguments, got {positional}")
    return found


def _overridden(call: Signature, node: Function, name: str, *, is_caller: bool) -> list[str]:
    """Return the differences between a method and that of the engine: forebay calls it, or else the engine does."""
    ours = [one.arg.lstrip("_") for one in (*node.args.args, *node.args.kwonlyargs) if one.arg not in ("self", "cls")]
    found = _missing(call, [one for one in ours if one], name)
    is_open = not is_caller and (node.args.kwarg or node.args.vararg)
    new = [
        one for one, is_due in call.arguments.items() if one not in ours and (is_due or not is_caller) and not is_open
    ]
    return found + [f"{name} has a new argument: {one}" for one in new]
