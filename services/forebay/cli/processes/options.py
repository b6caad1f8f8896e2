"""Options of workers, ingresses and snapshots that `forebay up` shares with `worker`, `ingress` and `router`."""

import re
import string
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from forebay.events.names import Kind, NameInvalid, require_adapter, require_name
from forebay.ingress.errors import Unusable

NAME_CHARS_MAX = 256  # the maximum length of a name in an event

TaintsOption = Annotated[
    list[str] | None, typer.Option("--taint", help="Worker label that requests may require or prefer. Repeatable.")
]
PlacedTaintsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--taint", help="Worker label that requests may require or prefer; mock-2:LABEL for one worker. Repeatable."
    ),
]
LorasOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora", help="LoRA adapter, served under its own model name. NAME=DIR with a real engine. Repeatable."
    ),
]
KvEventsOption = Annotated[bool, typer.Option("--kv-events/--no-kv-events", help="Publish KV cache events.")]
DpSizeOption = Annotated[int, typer.Option(min=1, max=1024, help="Data-parallel ranks per worker.")]
DpStartRankOption = Annotated[int, typer.Option(min=0, max=1 << 20, help="First data-parallel rank of the worker.")]
KvTransportOption = Annotated[
    Literal["nixl", "tcp"] | None,
    typer.Option(help="Transport of KV blocks between mock workers. Default: nixl."),
]
KvBytesPerTokenOption = Annotated[
    int | None, typer.Option(min=1, max=1 << 20, help="Bytes of KV per token. Mock engine only. Default: 256.")
]
KvChecksumOption = Annotated[
    bool | None,
    typer.Option("--kv-checksum/--no-kv-checksum", help="Verify checksums of received KV blocks. Mock engine only."),
]
KvLeaseOption = Annotated[
    float | None,
    typer.Option(
        "--kv-lease-s", min=0.1, max=3_600.0, help="Seconds that unfetched KV is kept. Mock engine only. Default: 30."
    ),
]
KvHostOption = Annotated[
    str | None,
    typer.Option(help="Address from which other workers fetch KV. Default: the local address of the route to Kafka."),
]
RoutingHintsOption = Annotated[
    bool, typer.Option("--routing-hints", help="Accept worker, priority, session and policy class from clients.")
]
AdminApiOption = Annotated[
    bool,
    typer.Option(
        "--admin-api/--no-admin-api",
        envvar="FOREBAY_ADMIN_API",
        help="Serve the admin API: commands, busy thresholds and disaggregation. Requires a token.",
    ),
]
AllowHostOption = Annotated[
    list[str] | None,
    typer.Option("--allow-host", help="Additional allowed value of the Host header. Repeatable."),
]
ToolCallParserOption = Annotated[
    str, typer.Option(help="Tool call parser: auto (by chat template), none, or a parser name.")
]
ReasoningParserOption = Annotated[
    str, typer.Option(help="Reasoning parser: auto (by chat template), none, or a parser name.")
]
MediaAllowHostOption = Annotated[
    list[str] | None,
    typer.Option("--media-allow-host", help="Private host from which images may be fetched. Repeatable."),
]
MediaAllowPrivateOption = Annotated[
    bool, typer.Option("--media-allow-private", help="Fetch images from private addresses. For tests only.")
]
BodyBytesMaxOption = Annotated[
    int,
    typer.Option(
        "--body-bytes-max",
        min=1_024,
        max=1 << 30,
        help="Maximum bytes of a request body without images and videos. Larger bodies get 413.",
    ),
]
MediaBodyBytesMaxOption = Annotated[
    int,
    typer.Option(
        "--media-body-bytes-max",
        min=1_024,
        max=1 << 30,
        help="Maximum bytes of a request body with images and videos. Larger bodies get 413.",
    ),
]

SnapshotEveryOption = Annotated[int, typer.Option(min=1, help="Take a snapshot after this many journal records.")]
SnapshotAgeOption = Annotated[
    int, typer.Option(min=1, max=86_400, help="Take a snapshot after this many seconds, if fewer records were written.")
]
LogMaxSizeOption = Annotated[
    str | None,
    typer.Option(
        help="Maximum log size, such as 500MB. The oldest records are removed, up to a snapshot. Default: 10GB for"
        " a file, 1GB in memory."
    ),
]
LogMaxAgeOption = Annotated[
    str | None, typer.Option(help="Maximum age of records, such as 12h or 7d. Default: no limit.")
]


def names(flag: str, given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the values of an option that may be repeated.

    Raises:
        Unusable: A value has an invalid length, or appears twice.
    """
    for name in given or ():
        if not 1 <= len(name) <= NAME_CHARS_MAX:
            raise Unusable(f"{flag} {name[:32]!r}: a name has 1 to {NAME_CHARS_MAX} characters, got {len(name)}")
    values = tuple(dict.fromkeys(given or ()))
    if len(values) < len(given or ()):
        twice = next(name for name in values if (given or ()).count(name) > 1)
        raise Unusable(f"{flag} {twice}: the name appears twice; use each name once")
    return values


def named(flag: str, kind: Kind, name: str) -> str:
    """Return `name` if it is a valid name for its kind. Otherwise raise Unusable with the option `flag`."""
    try:
        return require_name(kind, name)
    except NameInvalid as error:
        raise Unusable(f"{flag}: {error}") from error


def adapters(loras: Sequence[str], model: str) -> tuple[str, ...]:
    """Return the names of the LoRA adapters of `model`. Raises Unusable if a name is invalid."""
    try:
        return tuple(require_adapter(name, model) for name in loras)
    except NameInvalid as error:
        raise Unusable(f"--lora: {error}") from error


def placed_taints(given: Sequence[str], workers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the taints (labels) of each worker.

    Args:
        given: Values of --taint, each LABEL for all workers or WORKER:LABEL for one.
        workers: Worker ids.

    Raises:
        Unusable: A value names an unknown worker or has an empty label.
    """
    labels: dict[str, dict[str, None]] = {worker: {} for worker in workers}
    kinds = {worker.rstrip(string.digits): worker for worker in workers}  # the last worker of each kind
    of_one = re.compile(rf"((?:{'|'.join(map(re.escape, kinds))})\d+):(.*)", re.DOTALL)
    for text in given:
        one = of_one.fullmatch(text)
        if one is None:
            for every in labels.values():
                every[text] = None
        elif one[1] not in labels:
            known = " and ".join(f"{kind}0 to {last}" for kind, last in kinds.items())
            raise Unusable(f"--taint {text}: unknown worker {one[1]}; workers are {known}")
        elif not one[2]:
            raise Unusable(f"--taint {text}: the label is empty; expected WORKER:LABEL")
        else:
            labels[one[1]][one[2]] = None
    return {worker: tuple(own) for worker, own in labels.items()}
