"""Read the interface of an engine's package from its source code, without importing or installing the package."""

import ast
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import msgspec


class Signature(msgspec.Struct, frozen=True, omit_defaults=True):
    """Arguments of a call: by name, whether the argument is required. With `is_open` the call takes any others."""

    arguments: dict[str, bool] = {}
    is_open: bool = False


class Interface(msgspec.Struct, omit_defaults=True):
    """Interface of a class or function. A member is a method's signature or an attribute's class, if that is known."""

    call: Signature = Signature()
    members: dict[str, Signature | str] = {}
    abstract: list[str] = []


class Recording(msgspec.Struct):
    """Interface of a package that cannot be downloaded. `source` says where it was read."""

    version: str
    date: str
    source: str
    interfaces: dict[str, Interface | None]
    texts: dict[str, list[str]]

    def interface(self, name: str) -> Interface | None:
        return self.interfaces.get(name)

    def strings(self, module: str) -> set[str]:
        return set(self.texts.get(module, ()))


class Package:
    """Interface of a package in a wheel or a directory.

    An object is named `module:name`. The name `package.*:*` stands for all fields of all classes in a package, and
    `module:Base*` has the subclasses of a class in its module as members.
    """

    def __init__(self, path: Path) -> None:
        self._root: Any = zipfile.Path(path) if path.is_file() else path
        self.interfaces: dict[str, Interface | None] = {}

    def interface(self, name: str) -> Interface | None:
        if name not in self.interfaces:
            self.interfaces[name] = None  # for a class that refers to itself
            module, _, inner = name.partition(":")
            if inner.endswith("*") and inner != "*":
                nodes = [(key, node) for key, node in self._names(module).items() if isinstance(node, ast.ClassDef)]
                kinds = [key for key, node in nodes if inner[:-1] in map(ast.unparse, node.bases)]
                self.interfaces[name] = Interface(members=dict.fromkeys(kinds, ""))
            elif inner == "*":
                nodes = [(one, node) for one in self._modules(module) for node in self._names(one).values()]
                made = [self._class(one, node) for one, node in nodes if isinstance(node, ast.ClassDef)]
                joined = {key: value for one in made for key, value in one.call.arguments.items()}
                self.interfaces[name] = Interface(Signature(joined))
            elif (found := self._locate(module, inner)) is not None:
                is_class = isinstance(found[1], ast.ClassDef)
                self.interfaces[name] = self._class(*found) if is_class else Interface(_signature(found[1], skipped=0))
        return self.interfaces[name]

    def strings(self, module: str) -> set[str]:
        """Return the string constants and the names of keywords in a module, or in the modules of `package.*`."""
        nodes = [node for one in self._modules(module) for node in ast.walk(self._parsed(one)[0])]
        found = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        return found | {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}

    def _modules(self, name: str) -> list[str]:
        if not name.endswith(".*"):
            return [name]
        files = [one.name for one in (self._root / name[:-2].replace(".", "/")).iterdir()]
        return [name[:-1] + one[:-3] for one in sorted(files) if one.endswith(".py")]

    @cache  # noqa: B019 - a package is used until the process ends
    def _parsed(self, module: str) -> tuple[ast.Module, bool]:
        """Return the source of a module, and whether the module is a package."""
        for suffix in (".py", "/__init__.py"):
            if (file := self._root / (module.replace(".", "/") + suffix)).exists():
                return ast.parse(file.read_bytes()), suffix != ".py"
        return ast.Module([], []), False

    @cache  # noqa: B019
    def _names(self, module: str) -> dict[str, Any]:
        """Return the definitions of a module by name; for an imported name `module:name`."""
        names: dict[str, Any] = {}
        tree, is_package = self._parsed(module)
        for node in ast.walk(tree):  # the module's own level first
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names.setdefault(name, node)
                case ast.ImportFrom():
                    path = module.split(".")
                    base = path[: len(path) - node.level + is_package] if node.level else []
                    source = ".".join([*base, *filter(None, [node.module])])
                    for one in node.names:
                        if one.name == "*":
                            names.setdefault("*", []).append(source)
                        else:
                            names.setdefault(one.asname or one.name, f"{source}:{one.name}")
        return names

    def _locate(self, module: str, name: str, depth: int = 8) -> tuple[str, Any] | None:
        found = self._names(module).get(name)
        for source in self._names(module).get("*", ()) if found is None and depth else ():
            found = found or self._locate(source, name, depth - 1)
        if isinstance(found, tuple):
            return found
        if isinstance(found, str):
            source, _, wanted = found.partition(":")
            return self._locate(source, wanted, depth - 1) if depth else None
        return None if found is None else (module, found)

    def _class(self, module: str, node: ast.ClassDef) -> Interface:
        fields: dict[str, bool] = {}
        members: dict[str, Any] = {}
        abstract: list[str] = []
        for base in reversed(node.bases):
            if (known := self.interface(self._class_of(module, base))) is not None:
                members |= known.members
                fields |= known.call.arguments
                abstract += known.abstract
        for one in node.body:
            match one:
                case ast.AnnAssign(target=ast.Name(id=name)):
                    members[name] = self._class_of(module, one.annotation) or members.get(name, "")
                    if "ClassVar" not in ast.unparse(one.annotation) and (due := _is_required(one.value)) is not None:
                        fields[name] = due
                case ast.Assign(targets=[ast.Name(id=name)]):
                    members.setdefault(name, "")
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    decorators = {ast.unparse(item).rpartition(".")[2] for item in one.decorator_list}
                    is_attribute = decorators & {"property", "cached_property", "setter"}
                    method = _signature(one, skipped="staticmethod" not in decorators)
                    members[one.name] = self._class_of(module, one.returns) if is_attribute else method
                    abstract = [name for name in abstract if name != one.name]
                    abstract += [one.name] if "abstractmethod" in decorators else []
                    for inner in ast.walk(one):
                        match inner:
                            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store(), attr=name):
                                members.setdefault(name, "")
        return Interface(members.get("__init__") or Signature(fields), members, abstract)

    def _class_of(self, module: str, annotation: ast.expr | None) -> str:
        """Return the class of the package that an annotation names, also if the value may be None; otherwise ''."""
        text = ast.unparse(annotation).strip("'") if annotation else ""
        text = text.removesuffix(" | None").removeprefix("Optional[").partition("[")[0].removesuffix("]")
        found = self._locate(module, text)
        return f"{found[0]}:{found[1].name}" if found is not None and isinstance(found[1], ast.ClassDef) else ""


def _signature(node: Any, *, skipped: int) -> Signature:
    plain = [*node.args.posonlyargs, *node.args.args]
    arguments = {one.arg: at < len(plain) - len(node.args.defaults) for at, one in enumerate(plain) if at >= skipped}
    arguments |= {
        one.arg: value is None for one, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    }
    return Signature(arguments, bool(node.args.kwarg or node.args.vararg))


def _is_required(value: ast.expr | None) -> bool | None:
    """Return whether the constructor needs a value for a field; None if it accepts none."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("field", "Field"):
        named = {one.arg: ast.unparse(one.value) for one in value.keywords}
        first = ast.unparse(value.args[0]) if value.args else named.get("default", named.get("default_factory"))
        return None if named.get("init") == "False" else first in (None, "...")
    return value is None
