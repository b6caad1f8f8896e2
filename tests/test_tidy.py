"""House rules that can be checked automatically, for every file of the repository."""

import ast
import functools
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("schemas", "streams", "services")
PYTHON_ROOTS = (*SOURCE_ROOTS, "infra", "tests")
FUNCTION_LINES_MAX = 70  # what fits on a screen
SURFACE = (
    "schemas/forebay/events",
    "streams/forebay/core/step.py",
    "streams/forebay/core/routing/policy.py",
    "streams/forebay/transport/base.py",
    "services/forebay/workers/engine.py",
    "services/forebay/workers/service.py",
)
FILLERS = frozenset(
    ("a", "an", "the", "of", "to", "in", "for", "by", "from", "with", "is", "are", "this", "return", "yield")
)
MODULE_DOCSTRING_LINES_MAX = 12  # five lines, or more with a theory of operation

# The patterns are assembled from parts, so that this file does not match them.
MACHINE_PATHS = re.compile(r"(?<![\w.@:/-])/(?:" + "work|root|home|Users" + r")/[\w.-]+")
REGISTRY_HOSTS = re.compile(
    r"--(?:extra-)?index-url[ =]+\S+|files\.python"
    r"hosted\.org|https?://[^\s)\"'>]*/simple\b"
    r"|https?://[^\s)\"'>]*\b(?:artifactory|nexus|pypi)\b[^\s)\"'>]*"
    r"|https?://(?:\d{1,3}\.){3}\d{1,3}:\d+/\S*/(?:pypi|maven|npm)\b",
    re.IGNORECASE,
)


# forebay is on no package index. `pip install PATH[fit]` installs an extra of a checkout or wheel.
INDEX_INSTALLS = re.compile(
    r"\bforebay\[[\w{}$.,-]+\](?!\w* @ )"
    r"|\b(?:pipx?3?|uv|uv tool) (?:install|add|run)(?: --?\w[\w-]*(?:[ =](?!forebay\b)\S+)?)*"
    r" forebay(?=[=<>~!]| (?!@)|$)"
    r"|\buvx forebay\b"
)


def tracked_files() -> list[Path]:
    """Return the files that are, or would be, part of the repository."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        return [ROOT / name for name in names if name and (ROOT / name).is_file()]
    hidden = re.compile(r"(^|/)(\.venv|\.tools|\.git|__pycache__|data|\.\w+_cache|\.hypothesis)(/|$)")
    found = (path for path in ROOT.rglob("*") if path.is_file())
    return [path for path in found if not hidden.search(path.relative_to(ROOT).as_posix())]


FILES = sorted(tracked_files())
MODULES = [path for path in FILES if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PYTHON_ROOTS]
SOURCES = [path for path in MODULES if path.relative_to(ROOT).parts[0] in SOURCE_ROOTS]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def check(faults: list[str], rule: str) -> None:
    assert not faults, rule + ":\n  " + "\n  ".join(faults)


class Definition(NamedTuple):
    """A public class or function."""

    name: str  # with the names of the classes around it
    line: int
    is_class: bool
    docstring: str | None


class Outline(NamedTuple):
    """What the rules need of a module. Syntax trees of all modules would take half a gigabyte."""

    docstring: str | None
    functions: list[tuple[str, int, int]]  # name, first line, number of lines
    definitions: list[Definition]
    prints: list[int]  # lines that call `print`
    private: list[tuple[int, str]]  # private names of other objects, in tests
    stale: list[tuple[int, str]]


@functools.cache
def outline(path: Path) -> Outline:
    text = path.read_text()
    tree = ast.parse(text, shown(path))
    functions = [(node.name, node.lineno, (node.end_lineno or 0) - node.lineno + 1) for node in function_nodes(tree)]
    definitions = list(public_definitions(tree))
    prints = list(print_calls(tree)) if "print(" in text else []
    is_test = path.relative_to(ROOT).parts[0] == "tests"
    private = list(private_accesses(text, tree)) if is_test else []
    stale = [] if is_test or "await " not in text else list(stale_checks(tree))
    return Outline(ast.get_docstring(tree), functions, definitions, prints, private, stale)


def function_nodes(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Visit only statements, which are a tenth of the nodes."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            children = getattr(node, field, None)
            if isinstance(children, list):  # an expression has a `body`, too
                pending += children


def print_calls(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno


def stale_checks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find `name in self.x`, then an `await`, then `self.x[name]`: other tasks may have removed the name meanwhile."""
    for function in function_nodes(tree):
        if not isinstance(function, ast.AsyncFunctionDef):
            continue
        nodes = [node for node in ast.walk(function) if isinstance(node, ast.Await | ast.Compare | ast.Subscript)]
        lookups = {
            node: ast.unparse(node.value)
            for node in nodes
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute)
            if isinstance(node.ctx, ast.Load)
        }
        checked: dict[str, int] = {}  # line of the newest check of an attribute
        awaited = 0
        for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(node, ast.Await):
                awaited = node.lineno
            elif isinstance(node, ast.Compare):
                if isinstance(node.ops[0], ast.In | ast.NotIn):
                    checked[ast.unparse(node.comparators[0])] = node.lineno
            elif checked.get(lookups.get(node, ""), awaited) < awaited:
                yield node.lineno, ast.unparse(node)


def public_definitions(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[Definition]:
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if child.name.startswith("_") or is_overload(child):
            continue
        is_class = isinstance(child, ast.ClassDef)
        yield Definition(prefix + child.name, child.lineno, is_class, ast.get_docstring(child))
        if isinstance(child, ast.ClassDef):
            yield from public_definitions(child, f"{prefix}{child.name}.")


def is_overload(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith(("overload", ".setter")) for decorator in node.decorator_list)


@functools.cache
def text_files() -> dict[Path, str]:
    texts = {}
    for path in FILES:
        try:
            texts[path] = path.read_text()
        except UnicodeDecodeError:
            continue
    return texts


def found_in_text(pattern: re.Pattern[str]) -> list[str]:
    faults = []
    for path, text in text_files().items():
        for number, line in enumerate(text.splitlines(), 1):
            if match := pattern.search(line):
                faults.append(f"{shown(path)}:{number}: {match[0]}")
    return faults


def test_the_namespace_has_no_init() -> None:
    faults = [shown(path) for path in FILES if path.parts[-2:] == ("forebay", "__init__.py")]
    check(faults, "`forebay` is a namespace of three source roots; remove")


def test_every_package_is_typed() -> None:
    tops = {p for path in SOURCES for p in path.parents if p.parent.name == "forebay" and p.parent != ROOT}
    faults = [shown(top) for top in sorted(tops) if not (top / "py.typed").exists()]
    check(faults, "packages without py.typed")


def test_the_namespace_contains_only_packages() -> None:
    check([shown(path) for path in SOURCES if path.parent.name == "forebay"], "every module belongs to a layer")


def test_public_class_names_are_unique_in_a_package() -> None:
    places: dict[tuple[Path, str], list[str]] = {}
    for path in SOURCES:
        for definition in outline(path).definitions:
            if definition.is_class and "." not in definition.name:
                places.setdefault((path.parent, definition.name), []).append(shown(path))
    faults = [f"{name}: {', '.join(found)}" for (_, name), found in places.items() if len(found) > 1]
    check(faults, "class names used twice")


def test_functions_are_short() -> None:
    faults = [
        f"{shown(path)}:{line}: {name} has {lines} lines"
        for path in MODULES
        for name, line, lines in outline(path).functions
        if lines > FUNCTION_LINES_MAX
    ]
    check(faults, f"functions have at most {FUNCTION_LINES_MAX} lines")


def test_no_module_imports_a_test_module() -> None:
    """Pytest imports a test module that another module imports twice, and its assertions are not rewritten."""
    pattern = re.compile(r"^(?:from|import) tests\.(?:\w+\.)*test_\w+ import", re.MULTILINE)
    # The first runs the tests of leases once more, on a real Redis; the last starts a process that imports itself.
    exempt = {
        "tests/integration/test_parts.py",
        "tests/integration/test_two_hosts_disagg.py",
        "tests/replay/test_anonymize.py",
    }
    faults = [shown(path) for path in MODULES if pattern.search(path.read_text()) and shown(path) not in exempt]
    check(faults, "move what test modules share into a module without tests")


def private_accesses(text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each private attribute of another object, and of each private name imported."""
    if not re.search(r"""(?<!\bself)(?<!\bcls)\._[a-zA-Z]|["' ]_[a-zA-Z]""", text):
        return  # most modules: visiting all nodes takes long
    defined = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute | ast.ImportFrom | ast.Call):
            continue
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            receiver = node.value.id if isinstance(node.value, ast.Name) else ""
            names = [node.attr] if receiver not in ("self", "cls") and node.attr not in defined else []
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif ast.unparse(node.func).split(".")[-1] in ("getattr", "setattr"):
            found = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            names = [text.rsplit(".", 1)[-1] for text in found[:1]]
        yield from ((node.lineno, name) for name in names if re.match(r"_(?!_)\w", name))


def test_tests_use_no_private_names_of_the_code_under_test() -> None:
    """Tests check behaviour through public names, so that the code can change inside."""
    # Public in spite of the underscore, or of vLLM, which has no public name for them.
    public = {"_asdict", "_exit", "_replace"}
    vllm = {"_bidirectional_kv_xfer_enabled", "_num_image_tokens", "_reqs_to_send"}
    faults = [
        f"{shown(path)}:{line}: {name}"
        for path in MODULES
        for line, name in outline(path).private
        if name not in public | vllm
    ]
    check(faults, "use a public name, or make one")


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("engine._ranks[0]", ["_ranks"]),
        ("self.engine._ranks", ["_ranks"]),
        ("from forebay.cli import _run", ["_run"]),
        ("patch.setattr('forebay.cli.serve._start', None)", ["_start"]),
        ("self._log = log; other._log", []),
        ("__class__.__name__; from __future__ import annotations", []),
    ],
)
def test_private_accesses_are_found(code: str, names: list[str]) -> None:
    assert [name for _, name in private_accesses(code, ast.parse(code))] == names


def test_modules_have_short_docstrings() -> None:
    faults = []
    for path in MODULES:
        docstring = outline(path).docstring
        if not docstring:
            faults.append(f"{shown(path)}: none")
        elif len(docstring.splitlines()) > MODULE_DOCSTRING_LINES_MAX:
            faults.append(f"{shown(path)}: {len(docstring.splitlines())} lines")
    check(faults, f"every module has a docstring of at most {MODULE_DOCSTRING_LINES_MAX} lines")


def test_the_surface_has_docstrings() -> None:
    """Others use these modules: events, the log, policies, the core's entry, the engine protocol, the service SDK."""
    surface = {ROOT / name for name in SURFACE}
    assert all(path.exists() for path in surface)
    faults = [
        f"{shown(path)}:{definition.line}: {definition.name}"
        for path in SOURCES
        if surface & {path, *path.parents}
        for definition in outline(path).definitions
        if not definition.docstring
    ]
    check(faults, "public classes and functions without a docstring")


def test_docstrings_say_more_than_the_name() -> None:
    faults = [
        f"{shown(path)}:{definition.line}: {definition.name}"
        for path in SOURCES
        for definition in outline(path).definitions
        if definition.docstring and not words(definition.docstring) - words(definition.name) - FILLERS
    ]
    check(faults, "docstrings that repeat the name; delete them")


def words(text: str) -> set[str]:
    """Return the words of a name or a sentence in lower case, without the ending of plurals."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Za-z][a-z]*|\d+", text)
    return {part.lower().removesuffix("s") for part in parts}


def test_members_are_not_looked_up_after_an_await_that_follows_their_check() -> None:
    faults = [f"{shown(path)}:{line}: {text}" for path in SOURCES for line, text in outline(path).stale]
    check(faults, "looked up after an await, although it was checked before; look it up once, before the await")


def test_there_are_no_todo_comments() -> None:
    words = re.compile(r"#.*\b(?:" + "TO" + "DO|FIX" + "ME|X" + "XX|HA" + r"CK)\b")
    check([f for f in found_in_text(words) if f.split(":")[0].endswith(".py")], "finish it or file it")


def test_services_do_not_print() -> None:
    faults = [
        f"{shown(path)}:{line}"
        for path in SOURCES
        if "/cli/" not in path.as_posix()  # commands print
        for line in outline(path).prints
    ]
    check(faults, "services log, they do not print")


def test_no_machine_paths() -> None:
    check(found_in_text(MACHINE_PATHS), "paths of somebody's machine")


def test_no_registry_hosts() -> None:
    check(found_in_text(REGISTRY_HOSTS), "hosts of package registries")


def index_installs(text: str) -> list[str]:
    """Find commands in text, also those that continue on the next line or in the next literal."""
    return [match[0] for match in INDEX_INSTALLS.finditer(re.sub(r"[\s\"'`\\]+", " ", text))]


def test_nothing_recommends_to_install_forebay_from_a_package_index() -> None:
    faults = [f"{shown(path)}: {found}" for path, text in text_files().items() for found in index_installs(text)]
    check(faults, "nobody owns this name; see forebay.runtime.errors.install_command")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pip install 'fore" + "bay[fit]'", True),
        ("pip install\n    'fore" + "bay[{extra}]'.", True),
        ('pip install"\n                " --upgrade \'fore' + "bay'", True),
        ("uv pip install --python env/bin/python fore" + "bay==0.1", True),
        ("needs the extra fore" + "bay[kv-tiers]", True),
        ("pip install 'PATH[fit]'; pip install 'fore" + "bay[fit] @ file:///PATH/forebay-0.1.0.whl'", False),
        ("pip install ./forebay-0.1.0-py3-none-any.whl, and response.forebay['worker']", False),
        ("helm install forebay infra/helm/forebay", False),
    ],
)
def test_installations_from_an_index_are_found(text: str, found: bool) -> None:
    assert bool(index_installs(text)) is found


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (MACHINE_PATHS, "open('/ho" + "me/ann/x')", True),
        (MACHINE_PATHS, "cd /wo" + "rk/main", True),
        (MACHINE_PATHS, "GET /v1/work/items and tests/ro" + "ot/x", False),
        (REGISTRY_HOSTS, "--index-" + "url https://mirror.example/any", True),
        (REGISTRY_HOSTS, "https://mirror.example/" + "simple/ruff", True),
        (REGISTRY_HOSTS, "--no-emit-index-url --group dev", False),
        (REGISTRY_HOSTS, "https://keepachangelog.com/en/1.1.0/", False),
    ],
)
def test_the_patterns_match_as_expected(pattern: re.Pattern[str], text: str, found: bool) -> None:
    assert bool(pattern.search(text)) is found


def test_code_blocks_of_pages_parse() -> None:
    parsers: dict[str, Callable[[str], object]] = {"toml": tomllib.loads, "python": ast.parse}
    for path in (path for path in FILES if path.suffix == ".md"):
        for indent, language, code in re.findall(
            r"^( *)```(\w+)\n(.*?)^ *```", path.read_text(), re.DOTALL | re.MULTILINE
        ):
            if language in parsers:
                try:
                    parsers[language](re.sub(f"^{indent}", "", code, flags=re.MULTILINE))
                except (tomllib.TOMLDecodeError, SyntaxError) as error:
                    pytest.fail(f"{shown(path)}: a block of {language} does not parse: {error}")


def test_requests_with_a_body_in_the_docs_are_declared_as_json() -> None:
    commands = [
        (path, command)
        for path in FILES
        if path.suffix == ".md"
        for command in re.findall(r"^ *curl (?:.*\\\n)*.*", path.read_text(), re.MULTILINE)
    ]
    faults = [
        f"{shown(path)}: {command}"
        for path, command in commands
        if re.search(r"\s(-d|--data)\s", command) and "Content-Type: application/json" not in command
    ]
    check(faults, "curl sends a body with the header Content-Type: application/json, which the ingress requires")


def test_every_make_target_in_the_docs_exists() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [path for path in FILES if path.suffix == ".md" and path.name != "CHANGELOG.md"]
    named = [
        (path, name) for path in pages for name in re.findall(r"(?:^|`)make ([a-z][\w-]*)", path.read_text(), re.M)
    ]
    assert {"up", "test"} <= {name for path, name in named if path.name == "README.md"}
    check(
        [f"{shown(path)}: make {name}" for path, name in named if name not in targets], "make targets that do not exist"
    )


def test_every_make_target_is_documented() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    targets = [line for line in lines if re.match(r"[a-z][\w-]*:(?!=)", line)]
    assert targets
    check([line for line in targets if not re.search(r"## \w", line)], "Makefile targets without a `##` help")


def without_code(page: str) -> str:
    return re.sub(r"^( *)```.*?^\1```|^<!--.*?-->|`[^`\n]+`", "", page, flags=re.DOTALL | re.MULTILINE)


def anchors(page: str) -> list[str]:
    """Return the anchors of the headings of a page, as GitHub and the site of `make docs` name them."""
    text = re.sub(r"^( *)```.*?^\1```", "", page, flags=re.DOTALL | re.MULTILINE)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return [re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles]


def test_links_between_pages_lead_to_a_file_and_a_heading() -> None:
    pages = {path: text for path, text in text_files().items() if path.suffix == ".md"}
    faults = []
    for path, text in pages.items():
        for link, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)#?([^)\s]*)\)", without_code(text)):
            target = (path.parent / link).resolve() if link else path
            # Of equal headings of a page, only the first has the same anchor everywhere.
            if not target.exists() or (anchor and anchor not in anchors(pages.get(target, ""))):
                faults.append(f"{shown(path)}: {link}#{anchor}")
    check(faults, "dead links")


@pytest.mark.parametrize(
    "name",
    sorted(path.name for path in ROOT.glob("requirements/*.txt") if not path.stem.endswith("-overrides")),
)
def test_requirements_are_hashed(name: str) -> None:
    text = (ROOT / "requirements" / name).read_text()
    blocks = re.split(r"\n(?=[a-z])", "\n" + text, flags=re.IGNORECASE)[1:]
    assert blocks
    check([block.splitlines()[0] for block in blocks if "--hash=sha256:" not in block], "requirements without hash")
