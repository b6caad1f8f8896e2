"""`forebay ingress`: a separate process with the OpenAI HTTP API and the Kafka API."""

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.cluster import (
    KAFKA,
    LOOPBACK,
    NAMESPACE,
    REDIS,
    Cluster,
    KafkaOption,
    NamespaceOption,
    PropertiesOption,
    RedisOption,
    VerboseOption,
    kafka_settings,
    start_logging,
)
from forebay.cli.common.errors import explained
from forebay.cli.common.option_groups import spread
from forebay.cli.policies.allowed import AllowPolicyOption, allowed_policies
from forebay.cli.processes.http_options import HttpOptions
from forebay.cli.processes.options import LorasOption, adapters, named, names


@spread
def ingress(
    kafka: KafkaOption = KAFKA,
    redis: RedisOption = REDIS,
    namespace: NamespaceOption = NAMESPACE,
    kafka_config: PropertiesOption = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on. Clients are not authenticated.")] = LOOPBACK,
    ingress_id: Annotated[str, typer.Option(help="Unique ingress id. Default: host name and process id.")] = "",
    model: Annotated[Path | None, typer.Option(help="Model directory. Default: the bundled mock model.")] = None,
    model_name: Annotated[str, typer.Option(help="Model name in the API. Default: the name of the directory.")] = "",
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
    drain_s: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=86_400.0,
            help="Seconds to wait for requests in flight after SIGTERM. New requests are rejected.",
        ),
    ] = 60.0,
    verbose: VerboseOption = False,
    *,
    http: HttpOptions,
) -> None:
    """Serve the OpenAI API and the Kafka API of a distributed system."""
    start_logging(verbose=verbose)
    # Imported here, because no other command should wait for an HTTP server to load.
    from forebay.cli.processes.ingress_process import serve  # noqa: PLC0415
    from forebay.ingress.model import model_name_of  # noqa: PLC0415

    with explained():
        cluster = Cluster(kafka_settings(kafka, namespace, kafka_config), redis, host, None)
        called = model_name_of(model, model_name)
        settings = http.settings(
            model_name=called,
            block_size=block_size,
            ingress_id=named("--ingress-id", "ingress", ingress_id or f"{socket.gethostname()}-{os.getpid()}"),
            loras=adapters(names("--lora", lora), called),
            reply_topics=tuple(reply_topic or ()),
        )
        policies = tuple(allowed_policies(allow_policy))
        serve(cluster, (host, port), model, settings, drain_s, http.allow_host or (), policies)
