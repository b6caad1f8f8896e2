"""Options that `forebay up` shares with the processes of its parts: what workers offer, what an ingress allows."""

import re
import string
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from forebay.events.names import Kind, NameInvalid, require_adapter, require_name
from forebay.ingress.errors import Unusable

NAME_CHARS_MAX = 256  # of a name on the wire

TaintsOption = Annotated[
    list[str] | None, typer.Option("--taint", help="Label of the worker that requests may ask for; repeatable.")
]
PlacedTaintsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--taint", help="Label of every worker, or mock-2:LABEL of one, that requests may ask for; repeatable."
    ),
]
LorasOption = Annotated[
    list[str] | None,
    typer.Option("--lora", help="LoRA adapter, a model name of its own, =DIR for a real engine; repeatable."),
]
KvEventsOption = Annotated[
    bool, typer.Option("--kv-events/--no-kv-events", help="Whether workers tell what they have cached.")
]
DpSizeOption = Annotated[int, typer.Option(min=1, max=1024, help="Data-parallel ranks a worker.")]
DpStartRankOption = Annotated[int, typer.Option(min=0, max=1 << 20, help="Number of the worker's first rank.")]
KvTransportOption = Annotated[
    Literal["nixl", "tcp"] | None,
    typer.Option(help="What moves KV from mock prefill to decode workers: nixl (the default), or tcp, the plain path."),
]
KvBytesPerTokenOption = Annotated[
    int | None, typer.Option(min=1, max=1 << 20, help="Bytes of KV that a token has; mock only, 256.")
]
KvChecksumOption = Annotated[
    bool | None,
    typer.Option("--kv-checksum/--no-kv-checksum", help="Check the KV that comes, byte by byte; mock only."),
]
KvLeaseOption = Annotated[
    float | None,
    typer.Option(
        "--kv-lease-s", min=0.1, max=3_600.0, help="How long KV is kept for who does not fetch it; mock only, 30."
    ),
]
KvHostOption = Annotated[
    str | None,
    typer.Option(
        help="Address of this machine at which other workers fetch its KV; when left out, the one on the way to Kafka."
    ),
]
RoutingHintsOption = Annotated[
    bool, typer.Option("--routing-hints", help="Let clients choose worker, priority, session and policy class.")
]
AdminApiOption = Annotated[
    bool,
    typer.Option(
        "--admin-api/--no-admin-api",
        envvar="FOREBAY_ADMIN_API",
        help="Serve commands, thresholds and disaggregation to clients that have the admin token.",
    ),
]
AllowHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host", help="Name in the Host header of requests, beside localhost and the address; repeatable."
    ),
]
ToolCallParserOption = Annotated[
    str, typer.Option(help="Finds tool calls in answers: auto (by the chat template), none, or its name.")
]
ReasoningParserOption = Annotated[
    str, typer.Option(help="Finds reasoning in answers: auto (by the chat template), none, or its name.")
]
MediaAllowHostOption = Annotated[
    list[str] | None,
    typer.Option("--media-allow-host", help="Host whose images may be fetched though it is private; repeatable."),
]
MediaAllowPrivateOption = Annotated[
    bool, typer.Option("--media-allow-private", help="Fetch images from private addresses, too: for tests and labs.")
]
BodyBytesMaxOption = Annotated[
    int,
    typer.Option(
        "--body-bytes-max", min=1_024, max=1 << 30, help="Bytes of a request body beside images and videos; else 413."
    ),
]
MediaBodyBytesMaxOption = Annotated[
    int,
    typer.Option(
        "--media-body-bytes-max",
        min=1_024,
        max=1 << 30,
        help="Bytes of a whole request body, if the model takes images or videos; else 413.",
    ),
]

SnapshotEveryOption = Annotated[int, typer.Option(min=1, help="Journal records between snapshots.")]
SnapshotAgeOption = Annotated[
    int, typer.Option(min=1, max=86_400, help="Seconds between snapshots, when fewer records come.")
]
LogMaxSizeOption = Annotated[
    str | None,
    typer.Option(
        help="Remove the oldest records, up to a snapshot, when they take more, as 500MB or 10GB; default 10GB for a"
        " file, 1GB in memory."
    ),
]
LogMaxAgeOption = Annotated[
    str | None, typer.Option(help="Remove records that are older, as 12h or 7d; kept at any age when left out.")
]


def names(flag: str, given: Sequence[str] | None) -> tuple[str, ...]:
    """The values of a repeated option. Raises Unusable for one that is no name or stands there twice."""
    for name in given or ():
        if not 1 <= len(name) <= NAME_CHARS_MAX:
            raise Unusable(f"{flag} {name[:32]!r}: a name has 1 to {NAME_CHARS_MAX} characters, not {len(name)}")
    values = tuple(dict.fromkeys(given or ()))
    if len(values) < len(given or ()):
        raise Unusable(f"{flag}: a name is given twice")
    return values


def named(flag: str, kind: Kind, name: str) -> str:
    """The name that an option gives. Raises Unusable."""
    try:
        return require_name(kind, name)
    except NameInvalid as error:
        raise Unusable(f"{flag}: {error}") from error


def adapters(loras: Sequence[str], model: str) -> tuple[str, ...]:
    """The names of adapters of a model. Raises Unusable."""
    try:
        return tuple(require_adapter(name, model) for name in loras)
    except NameInvalid as error:
        raise Unusable(f"--lora: {error}") from error


def placed_taints(given: Sequence[str], workers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The labels of each worker. Raises Unusable for a label of a worker that is not there."""
    labels: dict[str, dict[str, None]] = {worker: {} for worker in workers}
    kinds = {worker.rstrip(string.digits): worker for worker in workers}  # the last of each kind
    of_one = re.compile(rf"((?:{'|'.join(map(re.escape, kinds))})\d+):(.*)", re.DOTALL)
    for text in given:
        one = of_one.fullmatch(text)
        if one is None:
            for every in labels.values():
                every[text] = None
        elif one[1] not in labels:
            known = " and ".join(f"{kind}0 to {last}" for kind, last in kinds.items())
            raise Unusable(f"--taint {text}: there is no worker {one[1]}, only {known}")
        elif not one[2]:
            raise Unusable(f"--taint {text}: a label has at least one character")
        else:
            labels[one[1]][one[2]] = None
    return {worker: tuple(own) for worker, own in labels.items()}
