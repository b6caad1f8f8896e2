"""The environment of programs that connect to the internet from a test."""

import os

NAMES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
# The processes of pytest-xdist inherit the changed environment, so the original values are kept in it.
KEPT = "FOREBAY_TEST_"


def leave_out() -> None:
    """Make HTTP clients load no certificates, which takes each of them 50 ms and which almost no test needs."""
    if os.environ.get("SSL_CERT_DIR") == os.devnull:
        return
    for name in NAMES:
        if name in os.environ:
            os.environ[KEPT + name] = os.environ.pop(name)
    os.environ["SSL_CERT_DIR"] = os.devnull


def original_environment() -> dict[str, str]:
    """Return the environment of this process with the certificates that `leave_out` removed."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    return environment | {name: os.environ[KEPT + name] for name in NAMES if KEPT + name in os.environ}
