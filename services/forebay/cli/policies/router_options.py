"""Router options of every command that routes requests, and their conversion to a `RouterConfig`.

The names are Dynamo's. An absent option takes its value from the file of `--router-policy-config`, else from the
defaults of `RouterConfig`. An error names the option or the file that has the invalid value.
"""

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec

from forebay.cli.common.options import Option, declarations_of
from forebay.cli.policies.allowed import add_current_directory, require_policy
from forebay.cli.policies.file import named_fields, read_policy_file
from forebay.events.control import DisaggConfig, QueuePolicy, RouterConfig, RouterMode
from forebay.events.descriptions import split_description
from forebay.runtime.errors import ConfigError, prefixed
from forebay.simulate.field_descriptions import converted, with_field

MODES = get_args(RouterMode)
LOAD_ONLY = {"mode": "kv", "overlap_score_credit": 0.0, "use_kv_events": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOption(Option):
    """Router option.

    Attributes:
        path: path of the field in `RouterConfig`, with dots. Empty if the option sets no single field.
        serving: default of commands that serve requests, if the default of `RouterConfig` sets no limit. Simulations,
            and replays of logs of earlier versions, use the default of `RouterConfig`.
    """

    path: str = ""
    serving: float | None = None


def _field(path: str, text: str = "", serving: float | None = None) -> RouterOption:
    """Return the option of a field of `RouterConfig`. Its text and its default in `--help` are those of the field.

    An option cannot set null, so what null means is left out.
    """
    group, _, field = path.rpartition(".")
    part: Any = getattr(RouterConfig(), group) if group else RouterConfig()
    meaning = split_description(type(part).__doc__)[1].get(field, "").replace("`", "")
    meaning, null, _ = meaning.partition("; null ")
    text = text or meaning[:1].upper() + meaning[1:] + "." * bool(null)
    value = getattr(part, field) if serving is None else serving
    if isinstance(value, bool):
        shown = "on" if value else "off"
    else:
        shown = "off" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return RouterOption(help=text, default_text=shown, path=path, serving=serving)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """Router options. None is an absent option, so that a default does not override the value of the policy file."""

    PANEL: ClassVar = "Router"

    router_mode: Annotated[
        str | None, _field("mode", f"Routing policy: {', '.join(MODES)}, or a class as module.Class.")
    ] = None
    router_policy_config: Annotated[
        Path | None, RouterOption(help="YAML or JSON file with fields of the configuration. Options override it.")
    ] = None
    load_aware: Annotated[
        bool, RouterOption(help="Route by load only: kv mode without overlap credit and KV events.")
    ] = False
    router_temperature: Annotated[float | None, _field("temperature")] = None
    router_selection_policy: Annotated[Literal["default", "lmetric"] | None, _field("selection_policy")] = None
    router_kv_overlap_score_credit: Annotated[float | None, _field("overlap_score_credit")] = None
    router_kv_overlap_score_credit_decay: Annotated[float | None, _field("overlap_score_credit_decay")] = None
    router_host_cache_hit_weight: Annotated[float | None, _field("host_cache_hit_weight")] = None
    router_disk_cache_hit_weight: Annotated[float | None, _field("disk_cache_hit_weight")] = None
    router_shared_cache_hit_weight: Annotated[float | None, _field("shared_cache_hit_weight")] = None
    tier_credit: Annotated[Literal["weights", "measured"] | None, _field("tier_credit")] = None
    router_prefill_load_scale: Annotated[float | None, _field("prefill_load_scale")] = None
    router_decode_active_request_weight: Annotated[float | None, _field("decode_active_request_weight")] = None
    router_eviction_weight: Annotated[float | None, _field("eviction_weight")] = None
    router_kv_events: Annotated[
        bool | None,
        _field(
            "use_kv_events",
            "Learn from KV events what ranks have cached. Otherwise the owner assumes for --router-ttl-secs that a rank"
            " has cached each prompt routed to it.",
        ),
    ] = None
    router_track_prefill_tokens: Annotated[bool | None, _field("track_prefill_tokens")] = None
    router_track_active_blocks: Annotated[bool | None, _field("track_active_blocks")] = None
    router_track_output_blocks: Annotated[bool | None, _field("track_output_blocks")] = None
    router_assume_kv_reuse: Annotated[bool | None, _field("assume_kv_reuse")] = None
    router_ttl_secs: Annotated[float | None, _field("ttl_s")] = None
    router_predicted_ttl_secs: Annotated[float | None, _field("predicted_ttl_s")] = None
    router_queue_threshold: Annotated[float | None, _field("queue.threshold")] = None
    router_queue_policy: Annotated[QueuePolicy | None, _field("queue.policy")] = None
    router_queue_run_ahead: Annotated[
        float | None,
        _field(
            "queue.run_ahead",
            "Send a rank at most max_num_seqs times (1 + this fraction); queue further requests.",
            serving=0.25,
        ),
    ] = None
    router_queue_depth: Annotated[
        float | None,
        _field(
            "queue.depth",
            "Queue at most this multiple of max_num_seqs of all ranks, minimum 64 per rank; else respond 429.",
            serving=4.0,
        ),
    ] = None
    router_queue_timeout_secs: Annotated[
        float | None,
        _field("queue.timeout_s", "Seconds in the queue after which a request fails with 503. 0: off.", serving=10.0),
    ] = None
    router_session_affinity_ttl_secs: Annotated[float | None, _field("session_ttl_s")] = None
    router_session_affinity_mode: Annotated[Literal["hard", "soft"] | None, _field("session_mode")] = None
    active_decode_blocks_threshold: Annotated[float | None, _field("busy.active_decode_blocks_threshold")] = None
    active_prefill_tokens_threshold: Annotated[int | None, _field("busy.active_prefill_tokens_threshold")] = None
    active_prefill_tokens_threshold_frac: Annotated[
        float | None, _field("busy.active_prefill_tokens_threshold_frac")
    ] = None
    router_conditional_disagg: Annotated[
        bool, RouterOption(help="Compute short, mostly cached prompts on the decode worker (isl_bounding).")
    ] = False
    router_conditional_disagg_config: Annotated[
        str | None,
        RouterOption(
            help="JSON object with the disaggregation policy and its limits:"
            f" {', '.join(DisaggConfig.__struct_fields__)}."
        ),
    ] = None
    enforce_disagg: Annotated[bool | None, _field("disagg.enforce")] = None

    def config(self) -> RouterConfig:
        """Return the configuration. Raises ConfigError if an option, the policy file or the policy is invalid."""
        add_current_directory()  # also for a built-in mode: a log that is continued may name an earlier policy
        file = self.router_policy_config
        config = RouterConfig() if file is None else read_policy_file(file)
        config = _serving(config, set() if file is None else set(named_fields(file)))
        if self.load_aware:
            if self.router_mode not in (None, "kv"):
                raise ConfigError(f"--load-aware implies router mode kv and cannot be combined with {self.router_mode}")
            config = msgspec.structs.replace(config, **LOAD_ONLY)
        if self.router_conditional_disagg:
            config = msgspec.structs.replace(config, disagg=self._disagg(config.disagg))
        elif self.router_conditional_disagg_config is not None:
            raise ConfigError("--router-conditional-disagg-config requires --router-conditional-disagg")
        for name, option in ROUTER_OPTIONS.items():
            if option.path and (value := getattr(self, name)) is not None:
                config = _changed(config, option.path, value, option.flag(name))
        with prefixed(file if self.router_mode is None else "--router-mode"):
            require_policy(config.mode)
        return config

    def _disagg(self, disagg: DisaggConfig) -> DisaggConfig:
        """Return the disaggregation settings with the changes of Dynamo's flags."""
        name, text = "--router-conditional-disagg-config", self.router_conditional_disagg_config
        example = 'an object such as {"policy": "classic"}'
        try:
            changes = msgspec.json.decode(text or "{}")
        except (msgspec.DecodeError, RecursionError):
            raise ConfigError(f"{name}: {text} is not JSON; expected {example}") from None
        if not isinstance(changes, dict):
            raise ConfigError(f"{name}: expected {example}, got {text}")
        with prefixed(name):
            return converted(
                {**msgspec.to_builtins(disagg), "policy": "isl_bounding", **changes}, DisaggConfig, "field"
            )


ROUTER_OPTIONS: dict[str, RouterOption] = declarations_of(RouterOptions)


def _serving(config: RouterConfig, named: Container[str]) -> RouterConfig:
    """Set each field that the policy file does not contain to its default for serving (`RouterOption.serving`)."""
    for name, option in ROUTER_OPTIONS.items():
        if option.serving is not None and option.path not in named:
            config = _changed(config, option.path, option.serving, option.flag(name))
    return config


def _changed(config: RouterConfig, path: str, value: Any, flag: str) -> RouterConfig:
    try:
        changed: RouterConfig = with_field(config, path, value)
    except ValueError as error:
        raise ConfigError(str(error).replace(path.rpartition(".")[2], flag, 1)) from None
    except OverflowError:
        raise ConfigError(f"{flag}: the number is too large") from None
    return changed
