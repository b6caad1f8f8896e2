"""Packages that only some commands need. An extra of forebay installs them."""

from importlib.util import find_spec

from forebay.cli.common.errors import fail


def require_extra(extra: str, what: str, *packages: str) -> None:
    """Check that the packages of an extra are installed. Nothing is imported.

    Args:
        what: Command or option that needs the packages, for the error message.
        packages: Names of the modules to look for.

    Raises:
        click.exceptions.Exit: A package is missing.
    """
    for package in packages:
        if not _is_installed(package):
            fail(f"{what} requires the package {package}; install it with: pip install 'forebay[{extra}]'")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # it is imported, but has no spec: Faust replaces itself in sys.modules
        return True
