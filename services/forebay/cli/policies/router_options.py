"""Router options of every command that routes requests, and their conversion to a `RouterConfig`.

The names are Dynamo's. An absent option takes its value from the file of `--router-policy-config`, else from the
defaults of `RouterConfig`. An error names the option, variable or file that has the invalid value.
"""

import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, get_args

import msgspec
import typer

from forebay.cli.common.errors import explained
from forebay.cli.policies.allowed import add_current_directory, require_policy
from forebay.cli.policies.file import named_fields, read_policy_file
from forebay.events.control import DisaggConfig, QueuePolicy, RouterConfig, RouterMode
from forebay.ingress.errors import Unusable
from forebay.simulate.field_descriptions import allowed_values, invalid_field, unknown_field

PANEL = "Router"
MODE = "--router-mode"
LOAD_AWARE = "--load-aware"
POLICY_CONFIG = "--router-policy-config"
CONDITIONAL, CONDITIONS = "--router-conditional-disagg", "--router-conditional-disagg-config"
SCALE, OLD_SCALE = "--router-prefill-load-scale", "--router-kv-overlap-score-weight"

MODES = get_args(RouterMode)
LOAD_ONLY = {"mode": "kv", "overlap_score_credit": 0.0, "use_kv_events": False}


@dataclass(frozen=True, slots=True)
class RouterOption:
    """Router option of the command line.

    Attributes:
        flag: Name on the command line, with `--`.
        field: Path of the field in `RouterConfig`, with dots. Empty if the option sets no single field.
        help: Line in `--help`.
        hidden: Whether `--help` omits the option.
        serving: Default of commands that serve requests, if the default of `RouterConfig` sets no limit. Simulations,
            and replays of logs of earlier versions, use the default of `RouterConfig`.
    """

    flag: str
    field: str
    kind: Any
    help: str
    hidden: bool = False
    serving: float | None = None

    @property
    def parameter(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        """Environment variable of the option, for a router that Faust's own command line starts."""
        return f"FOREBAY_{self.parameter.upper()}"

    @property
    def default(self) -> str:
        """Default value as text. Empty if the option sets no single field."""
        if not self.field:
            return ""
        if self.serving is not None:
            return f"{self.serving:g}"
        value: Any = RouterConfig()
        for part in self.field.split("."):
            value = getattr(value, part)
        if isinstance(value, bool):
            return "on" if value else "off"
        return "off" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


OPTIONS = (
    RouterOption(MODE, "mode", str, f"Routing policy: {', '.join(MODES)}, or a class as module.Class."),
    RouterOption(POLICY_CONFIG, "", Path, "YAML or JSON file with fields of the configuration. Options override it."),
    RouterOption(LOAD_AWARE, "", bool, "Route by load only: kv mode without overlap credit and KV events."),
    RouterOption(
        "--router-temperature", "temperature", float, "Softmax temperature of the selection. 0 selects the lowest cost."
    ),
    RouterOption(
        "--router-selection-policy",
        "selection_policy",
        Literal["default", "lmetric"],
        "Cost: sum (default) or product (lmetric) of prefill and decode blocks.",
    ),
    RouterOption(
        "--router-kv-overlap-score-credit",
        "overlap_score_credit",
        float,
        "Prefill blocks that one cached block saves.",
    ),
    RouterOption(
        "--router-kv-overlap-score-credit-decay",
        "overlap_score_credit_decay",
        float,
        "Reduce the credit of workers that have more queued prefill than others.",
    ),
    RouterOption(
        "--router-host-cache-hit-weight", "host_cache_hit_weight", float, "Credit of a block cached in host memory."
    ),
    RouterOption("--router-disk-cache-hit-weight", "disk_cache_hit_weight", float, "Credit of a block cached on disk."),
    RouterOption(
        "--router-shared-cache-hit-weight",
        "shared_cache_hit_weight",
        float,
        "Credit of a block in the shared store of the worker.",
    ),
    RouterOption(
        "--tier-credit",
        "tier_credit",
        Literal["weights", "measured"],
        "Credit of blocks outside of the device: by these weights, or by measured load times.",
    ),
    RouterOption(SCALE, "prefill_load_scale", float, "Weight of prefill blocks in the cost."),
    RouterOption(OLD_SCALE, "prefill_load_scale", float, f"Deprecated name of {SCALE}.", hidden=True),
    RouterOption(
        "--router-decode-active-request-weight",
        "decode_active_request_weight",
        float,
        "Cost in blocks of one request in flight.",
    ),
    RouterOption(
        "--router-eviction-weight",
        "eviction_weight",
        float,
        "Cost in blocks of one cached block that a worker must evict for the prompt. 0 is off.",
    ),
    RouterOption("--router-kv-events", "use_kv_events", bool, "Use the KV events of workers."),
    RouterOption(
        "--router-track-prefill-tokens", "track_prefill_tokens", bool, "Count prompt tokens not yet computed as load."
    ),
    RouterOption(
        "--router-track-active-blocks", "track_active_blocks", bool, "Count KV blocks of running requests as load."
    ),
    RouterOption(
        "--router-track-output-blocks", "track_output_blocks", bool, "Count KV blocks of output tokens as load."
    ),
    RouterOption(
        "--router-assume-kv-reuse", "assume_kv_reuse", bool, "Count a prefix shared by running requests once."
    ),
    RouterOption(
        "--router-ttl-secs",
        "ttl_s",
        float,
        "Seconds that a routed prompt counts as cached on workers without KV events.",
    ),
    RouterOption(
        "--router-predicted-ttl-secs",
        "predicted_ttl_s",
        float,
        "Seconds that a routed prompt counts as cached until KV events arrive. 0: off.",
    ),
    RouterOption(
        "--router-queue-threshold",
        "queue.threshold",
        float,
        "Queue requests while every worker has more than this many engine steps of prefill.",
    ),
    RouterOption("--router-queue-policy", "queue.policy", QueuePolicy, "Order of queued requests."),
    RouterOption(
        "--router-queue-run-ahead",
        "queue.run_ahead",
        float,
        "Send a rank at most max_num_seqs times (1 + this fraction); queue further requests.",
        serving=0.25,  # measured: see docs/performance.md
    ),
    RouterOption(
        "--router-queue-depth",
        "queue.depth",
        float,
        "Queue at most this multiple of max_num_seqs of all ranks, minimum 64 per rank; else respond 429.",
        serving=4.0,  # a full queue drains in four times the duration of a request; the timeout ends longer waits
    ),
    RouterOption(
        "--router-queue-timeout-secs",
        "queue.timeout_s",
        float,
        "Seconds in the queue after which a request fails with 503. 0: off.",
        serving=10.0,  # longer than a burst takes, and shorter than most clients' patience
    ),
    RouterOption(
        "--router-session-affinity-ttl-secs",
        "session_ttl_s",
        float,
        "Seconds that a session keeps its worker after its last request. 0: off.",
    ),
    RouterOption(
        "--router-session-affinity-mode",
        "session_mode",
        Literal["hard", "soft"],
        "Session affinity: required (hard) or preferred (soft).",
    ),
    RouterOption(
        "--active-decode-blocks-threshold",
        "busy.active_decode_blocks_threshold",
        float,
        "Fraction of KV blocks, 0 to 1, above which a worker is busy.",
    ),
    RouterOption(
        "--active-prefill-tokens-threshold",
        "busy.active_prefill_tokens_threshold",
        int,
        "Queued prefill tokens above which a worker is busy.",
    ),
    RouterOption(
        "--active-prefill-tokens-threshold-frac",
        "busy.active_prefill_tokens_threshold_frac",
        float,
        "Queued engine steps of prefill above which a worker is busy.",
    ),
    RouterOption(
        CONDITIONAL,
        "",
        bool,
        "Compute short, mostly cached prompts on the decode worker (isl_bounding).",
    ),
    RouterOption(
        CONDITIONS,
        "",
        str,
        f"JSON object with the disaggregation policy and its limits: {', '.join(DisaggConfig.__struct_fields__)}.",
    ),
    RouterOption(
        "--enforce-disagg", "disagg.enforce", bool, "Reject a request if no prefill worker can compute its prompt."
    ),
)

Named = Callable[[RouterOption], str]


def router_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the router options to a command that has a parameter `router: RouterConfig`.

    An invalid option or an unusable policy ends the process with a one-line error and exit code 2 before the command
    starts.
    """

    @wraps(command)
    def with_options(**arguments: Any) -> None:
        given = {option: arguments.pop(option.parameter) for option in OPTIONS}
        with explained():
            router = router_config({option: value for option, value in given.items() if value is not None})
        if given[_option(OLD_SCALE)] is not None:
            sys.stderr.write(f"forebay: {OLD_SCALE} is the deprecated name of {SCALE}\n")
        command(**arguments, router=router)

    others = [parameter for parameter in signature(command).parameters.values() if parameter.name != "router"]
    flags = [_parameter(option) for option in OPTIONS]
    setattr(with_options, "__signature__", signature(command).replace(parameters=[*others, *flags]))  # noqa: B010
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in (*others, *flags)}
    return with_options


def router_config(given: Mapping[RouterOption, Any], named: Named = lambda option: option.flag) -> RouterConfig:
    """Return the router configuration from the values of options.

    Args:
        given: Value of each option; None for an absent option.
        named: Function that returns the name of an option for error messages.

    Raises:
        Unusable: An option, the policy file or the policy is invalid.
    """
    add_current_directory()  # also for a built-in mode: a log that is continued may name an earlier policy
    by_flag = {option.flag: value for option, value in given.items()}
    if SCALE in by_flag and OLD_SCALE in by_flag:
        raise Unusable(
            f"{named(_option(OLD_SCALE))} is the deprecated name of {named(_option(SCALE))}: use only one of them"
        )
    path = by_flag.get(POLICY_CONFIG)
    config = RouterConfig() if path is None else read_policy_file(path)
    config = _serving(config, set() if path is None else set(named_fields(path)))
    if by_flag.get(LOAD_AWARE):
        if by_flag.get(MODE, "kv") != "kv":
            raise Unusable(
                f"{named(_option(LOAD_AWARE))} implies router mode kv and cannot be combined with {by_flag[MODE]}"
            )
        config = msgspec.structs.replace(config, **LOAD_ONLY)
    if CONDITIONS in by_flag and not by_flag.get(CONDITIONAL):
        raise Unusable(f"{named(_option(CONDITIONS))} requires {named(_option(CONDITIONAL))}")
    if by_flag.get(CONDITIONAL):
        disagg = _conditional(config.disagg, by_flag.get(CONDITIONS), named(_option(CONDITIONS)))
        config = msgspec.structs.replace(config, disagg=disagg)
    for option, value in given.items():
        if option.field:
            config = _changed(config, option, value, named(option))
    try:
        require_policy(config.mode)
    except Unusable as error:
        source = named(_option(MODE)) if MODE in by_flag else path
        raise Unusable(f"{source}: {error}") from None
    return config


def router_config_of(environment: Mapping[str, str]) -> RouterConfig:
    """Return the router configuration from environment variables. See `RouterOption.variable`.

    Raises:
        Unusable: The value of a variable is invalid.
    """
    given: dict[RouterOption, Any] = {}
    for option in OPTIONS:
        text = environment.get(option.variable)
        if text is None or option.hidden:
            continue
        try:
            given[option] = Path(text) if option.kind is Path else msgspec.convert(text, option.kind, strict=False)
        except msgspec.ValidationError:
            meant = allowed_values(msgspec.inspect.type_info(option.kind))
            raise Unusable(f"{option.variable}: got {text}, must be {meant}") from None
    return router_config(given, lambda option: option.variable)


def _serving(config: RouterConfig, named: Container[str]) -> RouterConfig:
    """Set each field that the policy file does not contain to its default for serving (`RouterOption.serving`)."""
    for option in OPTIONS:
        if option.serving is not None and option.field not in named:
            config = _changed(config, option, option.serving, option.flag)
    return config


def _conditional(disagg: DisaggConfig, text: str | None, name: str) -> DisaggConfig:
    """Return the disaggregation settings with the changes of Dynamo's flags."""
    example = 'an object such as {"policy": "classic"}'
    try:
        changes = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        raise Unusable(f"{name}: {text} is not JSON; expected {example}") from None
    if not isinstance(changes, dict):
        raise Unusable(f"{name}: expected {example}, got {text}")
    if unknown := unknown_field(changes, DisaggConfig, "field"):
        raise Unusable(f"{name}: {unknown}")
    fields = {**msgspec.to_builtins(disagg), "policy": "isl_bounding", **changes}
    try:
        return msgspec.convert(fields, DisaggConfig)
    except msgspec.ValidationError as error:
        raise Unusable(f"{name}: {invalid_field(fields, DisaggConfig, error)}") from None


def _changed(config: RouterConfig, option: RouterOption, value: Any, name: str) -> RouterConfig:
    group, _, field = option.field.rpartition(".")
    part: msgspec.Struct = getattr(config, group) if group else config
    try:
        part = msgspec.structs.replace(part, **{field: value})
    except ValueError as error:
        raise Unusable(str(error).replace(field, name, 1)) from None
    except OverflowError:
        raise Unusable(f"{name}: the number is too large") from None
    return msgspec.structs.replace(config, **({group: part} if group else {field: value}))


def _option(flag: str) -> RouterOption:
    return next(option for option in OPTIONS if option.flag == flag)


def _parameter(option: RouterOption) -> Parameter:
    flag = f"{option.flag}/--no-{option.flag[2:]}" if option.kind is bool and option.field else option.flag
    shown = typer.Option(
        flag, help=option.help, hidden=option.hidden, rich_help_panel=PANEL, show_default=option.default or False
    )
    # None means absent, so that a default does not override the value of the policy file.
    annotation: Any = Annotated[Optional[option.kind], shown]  # noqa: UP045 - a value, not a type, for the checker
    return Parameter(option.parameter, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
