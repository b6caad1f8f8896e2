"""The router's options: the same flags for every command that routes, and one `RouterConfig` out of them.

Names are Dynamo's. What is not given comes from the policy file (`--router-policy-config`), else from the defaults of
`RouterConfig`. A value is refused by the name under which it was given.
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
from forebay.cli.policies.check import add_current_directory, require_policy
from forebay.cli.policies.file import named_fields, read_policy_file
from forebay.events.control import DisaggConfig, QueuePolicy, RouterConfig, RouterMode
from forebay.ingress.errors import Unusable
from forebay.simulate.field_descriptions import allowed_values, invalid_field

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
    """A flag. `field` is where its value goes in `RouterConfig`, parts joined by a dot; empty for none.

    `serving` is the default of a router that serves, where that of `RouterConfig`, which old logs and simulations have,
    sets no limit.
    """

    flag: str
    field: str
    kind: Any
    help: str
    hidden: bool = False
    serving: float | None = None

    @property
    def parameter(self) -> str:
        """Its name as a parameter of a command."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        """Its name in the environment, for a router that has no command line."""
        return f"FOREBAY_{self.parameter.upper()}"

    @property
    def default(self) -> str:
        """What holds when it is not given, for people."""
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
    RouterOption(MODE, "mode", str, f"How requests are routed: {', '.join(MODES)}, or a class of yours: module.Class."),
    RouterOption(POLICY_CONFIG, "", Path, "YAML or JSON file with fields of the configuration; flags win over it."),
    RouterOption(LOAD_AWARE, "", bool, "Route by load alone: kv mode, no credit for cached blocks, no KV events."),
    RouterOption("--router-temperature", "temperature", float, "0 takes the lowest cost; above, a draw by cost."),
    RouterOption(
        "--router-selection-policy",
        "selection_policy",
        Literal["default", "lmetric"],
        "Add prefill and decode blocks, or multiply them.",
    ),
    RouterOption(
        "--router-kv-overlap-score-credit",
        "overlap_score_credit",
        float,
        "Blocks of prefill that a cached block saves.",
    ),
    RouterOption(
        "--router-kv-overlap-score-credit-decay",
        "overlap_score_credit_decay",
        float,
        "Takes from the credit of workers with more to prefill than others.",
    ),
    RouterOption("--router-host-cache-hit-weight", "host_cache_hit_weight", float, "Credit of a block in host memory."),
    RouterOption("--router-disk-cache-hit-weight", "disk_cache_hit_weight", float, "Credit of a block on disk."),
    RouterOption(SCALE, "prefill_load_scale", float, "Weight of prefill blocks in the cost."),
    RouterOption(OLD_SCALE, "prefill_load_scale", float, f"The old name of {SCALE}.", hidden=True),
    RouterOption(
        "--router-decode-active-request-weight",
        "decode_active_request_weight",
        float,
        "Blocks that a request under way counts for.",
    ),
    RouterOption("--router-kv-events", "use_kv_events", bool, "Follow the workers' caches by their KV events."),
    RouterOption("--router-track-prefill-tokens", "track_prefill_tokens", bool, "Prompts not computed yet are load."),
    RouterOption("--router-track-active-blocks", "track_active_blocks", bool, "Blocks of running requests are load."),
    RouterOption("--router-track-output-blocks", "track_output_blocks", bool, "Blocks of output are load."),
    RouterOption(
        "--router-assume-kv-reuse", "assume_kv_reuse", bool, "Running requests with one prefix share its blocks."
    ),
    RouterOption(
        "--router-ttl-secs",
        "ttl_s",
        float,
        "What was routed to a worker without KV events is taken for cached this long.",
    ),
    RouterOption(
        "--router-predicted-ttl-secs",
        "predicted_ttl_s",
        float,
        "What was routed is taken for cached this long, until KV events say so; 0 is off.",
    ),
    RouterOption(
        "--router-queue-threshold",
        "queue.threshold",
        float,
        "Hold requests while every worker has more than this many engine steps of prefill.",
    ),
    RouterOption("--router-queue-policy", "queue.policy", QueuePolicy, "The order of held requests."),
    RouterOption(
        "--router-queue-run-ahead",
        "queue.run_ahead",
        float,
        "A worker rank is sent at most this share of its max_num_seqs beyond these; further requests are held.",
        serving=0.25,  # measured: see docs/performance.md
    ),
    RouterOption(
        "--router-queue-depth",
        "queue.depth",
        float,
        "Hold at most this multiple of the max_num_seqs of all ranks, 64 per rank at least; refuse others with 429.",
        serving=4.0,  # a full queue drains in four times the duration of a request: longer waits end by the timeout
    ),
    RouterOption(
        "--router-queue-timeout-secs",
        "queue.timeout_s",
        float,
        "A request held for longer is given up with 503; 0 is off.",
        serving=10.0,  # longer than a burst takes, and shorter than most clients' patience
    ),
    RouterOption(
        "--router-session-affinity-ttl-secs",
        "session_ttl_s",
        float,
        "A session keeps its worker this long after its last request; 0 is off.",
    ),
    RouterOption(
        "--router-session-affinity-mode",
        "session_mode",
        Literal["hard", "soft"],
        "Whether a session must stay, or would rather.",
    ),
    RouterOption(
        "--active-decode-blocks-threshold",
        "busy.active_decode_blocks_threshold",
        float,
        "A worker is busy above this share of its KV blocks, 0 to 1.",
    ),
    RouterOption(
        "--active-prefill-tokens-threshold",
        "busy.active_prefill_tokens_threshold",
        int,
        "A worker is busy above this many tokens to prefill.",
    ),
    RouterOption(
        "--active-prefill-tokens-threshold-frac",
        "busy.active_prefill_tokens_threshold_frac",
        float,
        "A worker is busy above this many engine steps of prefill.",
    ),
    RouterOption(
        CONDITIONAL,
        "",
        bool,
        "Of a decode pool: leave prompts that are short and mostly cached where they are answered (isl_bounding).",
    ),
    RouterOption(
        CONDITIONS, "", str, f"JSON with another policy and its limits: {', '.join(DisaggConfig.__struct_fields__)}."
    ),
    RouterOption(
        "--enforce-disagg", "disagg.enforce", bool, "Refuse a request whose prompt no prefill worker can compute."
    ),
)

Named = Callable[[RouterOption], str]


def router_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the router's flags; it takes them as one parameter `router: RouterConfig`.

    Before the command starts, what cannot be used ends it with a line and exit code 2, a policy that is not
    deterministic included.
    """

    @wraps(command)
    def with_options(**arguments: Any) -> None:
        given = {option: arguments.pop(option.parameter) for option in OPTIONS}
        with explained():
            router = router_config({option: value for option, value in given.items() if value is not None})
        if given[_option(OLD_SCALE)] is not None:
            sys.stderr.write(f"forebay: {OLD_SCALE} is the old name of {SCALE}\n")
        command(**arguments, router=router)

    others = [parameter for parameter in signature(command).parameters.values() if parameter.name != "router"]
    flags = [_parameter(option) for option in OPTIONS]
    setattr(with_options, "__signature__", signature(command).replace(parameters=[*others, *flags]))  # noqa: B010
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in (*others, *flags)}
    return with_options


def router_config(given: Mapping[RouterOption, Any], named: Named = lambda option: option.flag) -> RouterConfig:
    """The configuration that these values make, its policy checked. `named` says how a user calls an option.

    Raises Unusable, naming the option or the file and what is wrong with it.
    """
    add_current_directory()  # also for a built-in mode: a log that is continued may name an earlier policy
    by_flag = {option.flag: value for option, value in given.items()}
    if SCALE in by_flag and OLD_SCALE in by_flag:
        raise Unusable(f"{named(_option(OLD_SCALE))} is the old name of {named(_option(SCALE))}: give one of them")
    path = by_flag.get(POLICY_CONFIG)
    config = RouterConfig() if path is None else read_policy_file(path)
    config = _serving(config, set() if path is None else set(named_fields(path, "")))
    if by_flag.get(LOAD_AWARE):
        if by_flag.get(MODE, "kv") != "kv":
            raise Unusable(f"{named(_option(LOAD_AWARE))} is the kv mode, not {by_flag[MODE]}: leave one of them out")
        config = msgspec.structs.replace(config, **LOAD_ONLY)
    if CONDITIONS in by_flag and not by_flag.get(CONDITIONAL):
        raise Unusable(f"{named(_option(CONDITIONS))} belongs to {named(_option(CONDITIONAL))}: give both")
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
    """The configuration that environment variables make, for each option one: see `RouterOption.variable`.

    Raises Unusable, naming the variable and what is wrong with it.
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
            raise Unusable(f"{option.variable} is {text}: must be {meant}") from None
    return router_config(given, lambda option: option.variable)


def _serving(config: RouterConfig, named: Container[str]) -> RouterConfig:
    """The configuration with the defaults of a router that serves, where a file has not `named` the field."""
    for option in OPTIONS:
        if option.serving is not None and option.field not in named:
            config = _changed(config, option, option.serving, option.flag)
    return config


def _conditional(disagg: DisaggConfig, text: str | None, name: str) -> DisaggConfig:
    """What of a decode pool's prompts is computed where, as Dynamo's flags say it."""
    example = 'an object, as {"policy": "classic"}'
    try:
        changes = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        raise Unusable(f"{name}: {text} is no JSON; it must be {example}") from None
    if not isinstance(changes, dict):
        raise Unusable(f"{name}: must be {example}, not {text}")
    if unknown := sorted(set(changes) - set(DisaggConfig.__struct_fields__)):
        known = ", ".join(DisaggConfig.__struct_fields__)
        raise Unusable(f"{name}: unknown field {', '.join(unknown)}; there are {known}")
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
        raise Unusable(f"{name} is a number with more digits than anything has") from None
    return msgspec.structs.replace(config, **({group: part} if group else {field: value}))


def _option(flag: str) -> RouterOption:
    return next(option for option in OPTIONS if option.flag == flag)


def _parameter(option: RouterOption) -> Parameter:
    flag = f"{option.flag}/--no-{option.flag[2:]}" if option.kind is bool and option.field else option.flag
    shown = typer.Option(
        flag, help=option.help, hidden=option.hidden, rich_help_panel=PANEL, show_default=option.default or False
    )
    # None stands for what is not given, so that a file's value is not overridden by a default.
    annotation: Any = Annotated[Optional[option.kind], shown]  # noqa: UP045 - a value, not a type, for the checker
    return Parameter(option.parameter, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
