"""House rules that can be checked automatically, for every file of the repository."""

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.events.schema import TOPICS
from tests.harness.samples import SAMPLES, samples

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("schemas", "streams", "services")
PYTHON_ROOTS = (*SOURCE_ROOTS, "infra", "tests")
FUNCTION_LINES_MAX = 70  # what fits on a screen
FILE_LINES_MAX = 500  # what fits in a head
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


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), shown(path))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def public_definitions(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if child.name.startswith("_") or is_overload(child):
            continue
        yield prefix + child.name, child
        if isinstance(child, ast.ClassDef):
            yield from public_definitions(child, f"{prefix}{child.name}.")


def is_overload(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith(("overload", ".setter")) for decorator in node.decorator_list)


def text_files() -> Iterator[tuple[Path, str]]:
    for path in FILES:
        try:
            yield path, path.read_text()
        except UnicodeDecodeError:
            continue


def found_in_text(pattern: re.Pattern[str]) -> list[str]:
    faults = []
    for path, text in text_files():
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


def test_public_class_names_are_unique() -> None:
    """Each class name has one meaning."""
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for name, node in public_definitions(parsed(path)):
            if isinstance(node, ast.ClassDef) and "." not in name:
                places.setdefault(name, []).append(shown(path))
    check([f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1], "class names used twice")


def test_functions_are_short() -> None:
    faults = []
    for path in MODULES:
        for function in functions(parsed(path)):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                faults.append(f"{shown(path)}:{function.lineno}: {function.name} has {lines} lines")
    check(faults, f"functions have at most {FUNCTION_LINES_MAX} lines")


def test_no_module_imports_a_test_module() -> None:
    """Pytest imports a test module that another module imports twice, and its assertions are not rewritten."""
    pattern = re.compile(r"^(?:from|import) tests\.(?:\w+\.)*test_\w+ import", re.MULTILINE)
    # The first runs the tests of leases once more, on a real Redis; the last starts a process that imports itself.
    exempt = {
        "tests/integration/test_parts.py",
        "tests/integration/test_two_hosts_disagg.py",
        "tests/core/test_kv_released.py",
        "tests/replay/test_anonymize.py",
    }
    faults = [shown(path) for path in MODULES if pattern.search(path.read_text()) and shown(path) not in exempt]
    check(faults, "move what test modules share into a module without tests")


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in MODULES}
    faults = [f"{shown(path)}: {lines} lines" for path, lines in lengths.items() if lines > FILE_LINES_MAX]
    check(faults, f"files have at most {FILE_LINES_MAX} lines")


def test_modules_have_short_docstrings() -> None:
    faults = []
    for path in MODULES:
        docstring = ast.get_docstring(parsed(path))
        if not docstring:
            faults.append(f"{shown(path)}: none")
        elif len(docstring.splitlines()) > MODULE_DOCSTRING_LINES_MAX:
            faults.append(f"{shown(path)}: {len(docstring.splitlines())} lines")
    check(faults, f"every module has a docstring of at most {MODULE_DOCSTRING_LINES_MAX} lines")


def test_public_names_have_docstrings() -> None:
    faults = []
    for path in SOURCES:
        for name, node in public_definitions(parsed(path)):
            assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if not ast.get_docstring(node):
                faults.append(f"{shown(path)}:{node.lineno}: {name}")
    check(faults, "public classes and functions without a docstring")


def test_there_are_no_todo_comments() -> None:
    words = re.compile(r"#.*\b(?:" + "TO" + "DO|FIX" + "ME|X" + "XX|HA" + r"CK)\b")
    check([f for f in found_in_text(words) if f.split(":")[0].endswith(".py")], "finish it or file it")


def test_services_do_not_print() -> None:
    faults = [
        f"{shown(path)}:{node.lineno}"
        for path in SOURCES
        if "/cli/" not in path.as_posix()  # commands print
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    check(faults, "services log, they do not print")


def test_no_machine_paths() -> None:
    check(found_in_text(MACHINE_PATHS), "paths of somebody's machine")


def test_no_registry_hosts() -> None:
    check(found_in_text(REGISTRY_HOSTS), "hosts of package registries")


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


def test_every_topic_is_documented() -> None:
    page = (ROOT / "docs/events.md").read_text()
    missing = [topic.name for topic in TOPICS if f"## `{topic.name}`" not in page]
    check(missing, "topics missing in docs/events.md; run `make schemas`")


def test_every_tag_has_a_golden_sample() -> None:
    missing = [name for name, *_ in samples() if not (SAMPLES / name / "expected.json").exists()]
    check(missing, "tags without a wire sample; run `make schemas` and commit it")


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


@pytest.mark.parametrize("name", ["requirements/base.txt", "requirements/engines.txt", "requirements/nixl.txt"])
def test_requirements_are_hashed(name: str) -> None:
    text = (ROOT / name).read_text()
    blocks = re.split(r"\n(?=[a-z])", "\n" + text, flags=re.IGNORECASE)[1:]
    assert blocks
    check(
        [block.splitlines()[0] for block in blocks if "--hash=sha256:" not in block],
        "requirements without hash",
    )
