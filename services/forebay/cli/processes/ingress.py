"""`forebay ingress`: a separate process with the OpenAI HTTP API and the Kafka API."""

import os
import socket
from typing import Annotated

import typer

from forebay.cli.common.cluster_options import LOOPBACK, ClusterOptions
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.logs import AccessLogOption, LoggingOptions
from forebay.cli.common.option_groups import spread
from forebay.cli.policies.allowed import AllowPolicyOption, allowed_policies
from forebay.cli.processes.http_options import HttpOptions
from forebay.cli.processes.options import (
    DrainOption,
    LorasOption,
    ModelNameOption,
    ModelOption,
    RevisionOption,
    adapters,
    named,
    names,
)


@spread
def ingress(
    addresses: ClusterOptions,
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on. Other machines need an API key.")] = LOOPBACK,
    ingress_id: Annotated[str, typer.Option(help="Unique ingress id. Default: host name and process id.")] = "",
    model: ModelOption = None,
    revision: RevisionOption = None,
    model_name: ModelNameOption = "",
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens per KV block. Default: the block size of the model's pool.")
    ] = None,
    lora: LorasOption = None,
    reply_topic: Annotated[
        list[str] | None,
        typer.Option(
            help="Topic pattern that Kafka clients may use as reply-topic; * matches any characters. Repeatable. "
            "Default: NAMESPACE.replies.*."
        ),
    ] = None,
    allow_policy: AllowPolicyOption = None,
    drain_s: DrainOption = 60.0,
    access_log: AccessLogOption = True,
    *,
    http: HttpOptions,
    logs: LoggingOptions,
) -> None:
    """Serve the OpenAI API and the Kafka API of a distributed system.

    Without --model and --model-name, all models are served that have ready workers. Their tokenizers and chat templates
    come from the topic `models`.
    """
    logs.start(has_access_log=access_log)
    # Imported here, because no other command should wait for an HTTP server to load.
    from forebay.cli.processes.ingress_process import serve  # noqa: PLC0415
    from forebay.cli.processes.model_source import find_model  # noqa: PLC0415
    from forebay.ingress.model import DEFAULT_MODEL  # noqa: PLC0415
    from forebay.ingress.settings import ALL_MODELS  # noqa: PLC0415

    with explained():
        cluster = addresses.cluster(host, None)
        directory, called = find_model(model, revision, model_name, weights=False)
        if model is None and model_name:
            directory = DEFAULT_MODEL
        settings = http.settings(
            model_name=ALL_MODELS if directory is None else called,
            block_size=block_size,
            ingress_id=named("--ingress-id", "ingress", ingress_id or f"{socket.gethostname()}-{os.getpid()}"),
            loras=adapters(names("--lora", lora), called),
            reply_topics=tuple(reply_topic or ()),
        )
        if directory is None and lora:
            fail("--lora requires --model or --model-name, the model of the adapter")
        policies = tuple(allowed_policies(allow_policy))
        serve(cluster, http.endpoint(host, port), directory, settings, drain_s, policies)
