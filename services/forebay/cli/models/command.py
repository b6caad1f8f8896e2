"""Options of `forebay model`. The code is imported when a command runs, so that --help does not wait for it."""

from typing import Annotated

import typer

from forebay.cli.common.cluster_options import KafkaOptions
from forebay.cli.common.operator_name import OperatorOption
from forebay.cli.common.option_groups import spread
from forebay.cli.processes.options import ModelNameOption, RevisionOption

app = typer.Typer(help="Store and list model cards, and set aliases of models.", no_args_is_help=True)


@app.command("publish")
@spread
def publish(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model directory, or ORG/NAME on the Hugging Face Hub.")
    ],
    revision: RevisionOption = None,
    model_name: ModelNameOption = "",
    *,
    kafka: KafkaOptions,
) -> None:
    """Store the card, tokenizer and chat template of a model on the topic `models`, and print the digest of the card.

    Workers do this at their start, so the command is only needed to store a model before its workers start.
    """
    from forebay.cli.models.run import run_publish  # noqa: PLC0415

    run_publish(model=model, revision=revision, model_name=model_name, kafka=kafka)


@app.command("list")
@spread
def list_models(
    *,
    kafka: KafkaOptions,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per card or alias on stdout.")] = False,
) -> None:
    """List the stored model cards, newest first, and the aliases."""
    from forebay.cli.models.run import run_list  # noqa: PLC0415

    run_list(kafka=kafka, json=json)


@app.command("remove")
@spread
def remove(
    name: Annotated[
        str, typer.Argument(metavar="NAME|DIGEST", help="Model, or the first 8 or more digits of a digest.")
    ],
    *,
    kafka: KafkaOptions,
) -> None:
    """Remove the stored cards of a model, or one older card of it, and files that no other card has.

    Cards that workers use are not removed. Workers remove the older cards of their model themselves.
    """
    from forebay.cli.models.run import run_remove  # noqa: PLC0415

    run_remove(name=name, kafka=kafka)


@app.command("alias")
@spread
def alias(
    name: Annotated[str, typer.Argument(metavar="ALIAS", help="Name that requests use.")],
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL[=WEIGHT]...", help="Models of the requests. Default weight: 1."),
    ] = None,
    fallback: Annotated[
        str, typer.Option(metavar="MODEL", help="Model for all requests while no worker of the others is ready.")
    ] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias.")] = False,
    operator: OperatorOption = "",
    *,
    kafka: KafkaOptions,
) -> None:
    """Let requests name a model by an alias, or divide the requests of an alias between models by weight.

    Running ingresses apply the change as soon as they read it. Requests in flight stay on their model.
    """
    from forebay.cli.models.run import run_alias  # noqa: PLC0415

    run_alias(name=name, targets=targets or [], fallback=fallback, remove=remove, operator=operator, kafka=kafka)
