"""`forebay picker`."""

from forebay.cli.common.errors import explained, run_service
from forebay.cli.processes.command import PickerCommand
from forebay.ingress.settings import ALL_MODELS, IngressSettings
from forebay.processes.names import named, process_name
from forebay.processes.picker import PickerSettings, run


def run_picker(options: PickerCommand) -> None:
    options.logs.start()
    with explained():
        settings = PickerSettings(
            cluster=options.addresses.cluster(options.host, options.metrics_port),
            ingress=IngressSettings(
                model_name=ALL_MODELS,
                ingress_id=named("--id", "ingress", options.picker_id or process_name()),
                ignore_unknown_fields=True,  # the server rejects fields that it does not know
                body_bytes_max=options.body_bytes_max,
                timeout_s=options.timeout_s,
            ),
            host=options.host,
            port=options.port,
            fallback=options.fallback,
            drain_s=options.drain_s,
        )
    run_service(run(settings))
