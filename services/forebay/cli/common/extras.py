"""Packages that only some commands need. An extra of forebay installs them."""

from importlib.util import find_spec

from forebay.cli.common.errors import fail
from forebay.runtime.errors import install_command


def require_extra(extra: str, what: str, *packages: str) -> None:
    """Exit if packages of an extra are missing, without importing them. The error says that `what` needs them."""
    for package in packages:
        if not _is_installed(package):
            fail(f"{what} requires the package {package}; install it with: {install_command(extra)}")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # it is imported, but has no spec: Faust replaces itself in sys.modules
        return True
    except ModuleNotFoundError:  # the package that should contain it is missing, too
        return False
