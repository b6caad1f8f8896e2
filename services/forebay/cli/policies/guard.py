"""Ends what would tell one run of a policy from another: clocks, chance, files, sockets, threads, libm.

Theory of operation. A profile function sees every call of a C function before it happens, however it was imported,
and an audit hook what begins in C. What installed modules do while a policy imports them is their own affair; what the
policy's own code does never is. The first call is kept, because a policy may catch the exception.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

CLOCKS = {"datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
# Anything these modules do is time, chance or the outside. Names are those of the C functions below the Python ones.
OUTSIDE = {"time", "posix", "nt", "io", "_io", "_socket", "_ssl", "_sqlite3", "_posixsubprocess", "_winapi", "select"}
SINGLE = {("_thread", "start_new_thread"), ("_thread", "start_joinable_thread")}
PURE = {("posix", "fspath"), ("nt", "fspath")}
# Exact, or rounded correctly by IEEE 754, so the same everywhere; the others are as good as the machine's libm.
EXACT_MATH = {
    *("ceil", "comb", "copysign", "fabs", "factorial", "floor", "fmod", "frexp", "fsum", "gcd", "isclose", "isfinite"),
    *(
        "isinf",
        "isnan",
        "isqrt",
        "lcm",
        "ldexp",
        "modf",
        "nextafter",
        "perm",
        "prod",
        "remainder",
        "sqrt",
        "trunc",
        "ulp",
    ),
}
AUDITED = ("open", "os.", "socket.", "subprocess.", "_thread.", "sqlite3.", "ctypes.", "shutil.", "tempfile.")
SPELLED = {"posix": "os", "nt": "os", "_io": "io", "_thread": "threading", "_socket": "socket"}
OTHER_STATE = "what a policy may know is in its world and its request"
MACHINES = "whose last bits differ between machines; `decimal` is the same everywhere"


class Forbidden(Exception):
    """A policy called what it must not; the text says what, where, and what to use instead."""


class Guard:
    """While `watching`, calls that are not deterministic raise Forbidden; `found` is the first of them."""

    def __init__(self, package: str) -> None:
        self.found: Forbidden | None = None
        self._package = package
        self._watching = False
        sys.addaudithook(self._on_audit)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what the body calls."""
        self._watching = True
        sys.setprofile(self._on_call)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._watching = False

    def _on_call(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            name, why = _forbidden(called)
            if name:
                self._refuse(frame, name, why)
            elif called is id and self._is_his(frame):
                self._refuse(frame, "id", "which differs between processes")
        elif event == "call" and frame.f_code.co_qualname.startswith("_Environ."):
            self._refuse(frame.f_back, "os.environ", OTHER_STATE)

    def _on_audit(self, event: str, _: Any) -> None:
        if self._watching and event.startswith(AUDITED):
            self._refuse(sys._getframe(1), event, OTHER_STATE)

    def _refuse(self, frame: FrameType | None, name: str, why: str) -> None:
        """Raise Forbidden, in terms of what the policy's code called, unless another module is being imported."""
        while frame is not None and (module := _module(frame)).partition(".")[0] in sys.stdlib_module_names:
            if module.startswith("importlib"):
                return
            if not module.startswith("_") and name != "os.environ":
                name = f"{module}.{frame.f_code.co_qualname}"
            frame = frame.f_back
        if frame is None or not (self._is_his(frame) or not _importing(frame)):
            return
        where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        error = Forbidden(f"calls {_spelled(name)} ({where}), {why}")
        self.found = self.found or error
        raise error

    def _is_his(self, frame: FrameType) -> bool:
        """Whether this is code of the policy's module or of one beside it, not of an installed library."""
        return _module(frame).partition(".")[0] == self._package or "-packages" not in frame.f_code.co_filename


def _forbidden(called: Any) -> tuple[str, str]:
    """The name of a C function that must not be called, and why not; empty names for others."""
    module, name, owner = called.__module__, called.__qualname__, getattr(called, "__self__", None)
    if module is None:
        kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        if name in CLOCKS and any(kind.__module__ == "datetime" for kind in kinds):
            return f"datetime.{name}", OTHER_STATE
        if any(kind.__module__ == "_random" for kind in kinds):
            return f"random.{name}", "take chance from request.tie_seed"
        return "", ""
    if (module in OUTSIDE and (module, name) not in PURE) or (module, name) in SINGLE:
        return f"{module}.{name}", OTHER_STATE
    if module in {"math", "cmath"} and name not in EXACT_MATH:
        return f"{module}.{name}", MACHINES
    return "", ""


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if _module(frame).startswith("importlib"):
            return True
        frame = frame.f_back
    return False


def _spelled(name: str) -> str:
    """As the policy's author would write the call."""
    if name == "os.environ":
        return name
    module, _, rest = name.partition(".")
    name = f"{SPELLED.get(module, module)}.{rest}" if rest else name
    if name in {"io.open", "_io.open"}:
        name = "open"
    return f"{name.removesuffix('.__init__').replace('random.Random.', 'random.')}()"
