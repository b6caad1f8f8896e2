"""Options of `forebay tiers`. The code is imported when a command runs, so that --help does not wait for it."""

from typing import Annotated

import typer

app = typer.Typer(help="List, verify and purge stored KV blocks.", no_args_is_help=True)

PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="LOCATION", help="Directory of --kv-disk or --kv-store, or s3://BUCKET/PREFIX with boto3's credentials."
    ),
]
EndpointOption = Annotated[
    str, typer.Option(metavar="URL", help="S3 endpoint. Default: the one of boto3's configuration.")
]
IdentityOption = Annotated[
    str,
    typer.Option(metavar="DIGITS", help="Only blocks of the identity that begins with DIGITS, as `list` prints it."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per line on stdout.")]


@app.callback()
def _root() -> None:
    """List, verify and purge stored KV blocks."""


@app.command("list")
def list_identities(
    place: PlaceArgument, endpoint: EndpointOption = "", identity: IdentityOption = "", json: JsonOption = False
) -> None:
    """List the identities in a store: model, rank and layout, blocks by the time of last use, bad files in quarantine.

    Workers share blocks if model, rank and layout are equal. Blocks of an identity that no worker has any more are
    useless. In a bucket, the time of last use is that of the write, because S3 does not record reads.
    """
    from forebay.cli.tiers.run import run_list  # noqa: PLC0415

    run_list(place=place, endpoint=endpoint, identity=identity, json=json)


@app.command("verify")
def verify(
    place: PlaceArgument,
    endpoint: EndpointOption = "",
    identity: IdentityOption = "",
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Move bad files to the quarantine.")] = False,
    json: JsonOption = False,
) -> None:
    """Read every block and verify its name, its identity and its checksums. Exits 1 if a block is bad.

    Workers may use the store meanwhile. They verify every block themselves, so bad blocks cost time, but never change
    an answer. Blocks of an identity without a description count as bad, but are never moved to the quarantine: the next
    worker with this identity describes it again.
    """
    from forebay.cli.tiers.run import run_verify  # noqa: PLC0415

    run_verify(place=place, endpoint=endpoint, identity=identity, quarantine=quarantine, json=json)


@app.command("purge")
def purge(
    place: PlaceArgument,
    endpoint: EndpointOption = "",
    identity: IdentityOption = "",
    older_than: Annotated[
        str, typer.Option(metavar="DURATION", help="Only blocks not used for DURATION, such as 12h or 7d.")
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="All blocks of all identities.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove blocks, by identity, by age, or all. Quarantined files are removed too.

    Workers may use the store meanwhile. They notice removed blocks as misses.
    """
    from forebay.cli.tiers.run import run_purge  # noqa: PLC0415

    run_purge(place=place, endpoint=endpoint, identity=identity, older_than=older_than, everything=everything, yes=yes)
