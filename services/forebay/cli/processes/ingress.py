"""`forebay ingress`."""

from forebay.cli.common.errors import explained, fail, run_service
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.processes.command import IngressCommand
from forebay.ingress.model import DEFAULT_MODEL
from forebay.ingress.settings import ALL_MODELS
from forebay.processes.ingress import IngressProcessSettings, run
from forebay.processes.model_source import find_model
from forebay.processes.names import adapters, named, names, process_name


def run_ingress(options: IngressCommand) -> None:
    options.logs.start(has_access_log=options.access_log)
    with explained():
        cluster = options.addresses.cluster(options.host, None)
        directory, called = find_model(options.model, options.revision, options.model_name, weights=False)
        if options.model is None and options.model_name:
            directory = DEFAULT_MODEL
        ingress = options.http.settings(
            model_name=ALL_MODELS if directory is None else called,
            block_size=options.block_size,
            ingress_id=named("--id", "ingress", options.ingress_id or process_name()),
            loras=adapters(names("--lora", options.lora), called),
            require_key=options.require_key,
            reply_topics=tuple(options.reply_topic or ()),
        )
        if directory is None and options.lora:
            fail("--lora requires --model or --model-name, the model of the adapter")
        settings = IngressProcessSettings(
            cluster=cluster,
            model=directory,
            ingress=ingress,
            endpoint=options.http.endpoint(options.host, options.port),
            drain_s=options.drain_s,
            policies=tuple(allowed_policies(options.allow_policy)),
        )
    run_service(run(settings))
