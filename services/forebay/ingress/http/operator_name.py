"""Field `operator` of request bodies: the name of the operator, which the event of the change contains."""

from typing import Annotated

from pydantic import AfterValidator, Field

from forebay.events.names import NAME_CHARS_MAX


def _require_printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"it has the unprintable characters {name[:64]!r}; use printable characters only")
    return name


OperatorField = Annotated[
    str,
    Field(
        max_length=NAME_CHARS_MAX,
        description="Name of the operator, for the log.",
        json_schema_extra={"pattern": "^[ -~]*$"},
    ),
    AfterValidator(_require_printable),
]
