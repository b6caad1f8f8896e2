"""Name the decision rules of an owner, and the release of forebay that has them, in messages."""

from functools import cache


@cache
def own_release() -> str:
    from importlib.metadata import version  # noqa: PLC0415 - takes 60 ms, which every command would wait for

    return version("forebay")


def rules_text(rules: int, release: str = "") -> str:
    return f"version {rules} of the rules" + (f" (forebay {release})" if release else "")
