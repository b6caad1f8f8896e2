"""Commands of one module each."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from forebay.cli.common.cluster_options import KafkaOptions, ServiceOptions, TopicPlanOptions
from forebay.cli.common.credentials import AdminTokenFileOption, ClientKeyOption
from forebay.cli.common.logs import LoggingOptions
from forebay.cli.common.operator_name import OperatorOption
from forebay.cli.common.options import Argument, JsonOption, Option
from forebay.cli.common.recording import KafkaSource, Recording, Source
from forebay.cli.common.times import TIMES_HELP
from forebay.cli.control.client import URL, UrlOption
from forebay.cli.policies.allowed import AllowPolicyOption
from forebay.cli.policies.alternative import AlternativeOptions
from forebay.events.keys import TENANT_WEIGHT_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusCommand:
    """Show the owner, workers, requests and topics of a running system or a log.

    Without LOG and --kafka, the ingress at --url is queried. Exits 1 if the system cannot serve requests.
    """

    RUN: ClassVar = "status:run_status"

    recording: Recording
    url: UrlOption = URL
    api_key: ClientKeyOption = None
    admin_token_file: AdminTokenFileOption = None
    allow_policy: AllowPolicyOption = None
    json: JsonOption = False
    watch: Annotated[bool, Option("--watch", help="Read and show the status again every 2 s.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCommand:
    """Talk to a model of a running system.

    Ctrl-C cancels an answer, Ctrl-D ends. Commands are /model to list and select models, /explain to see why the router
    selected the worker of the last answer, /new and /quit. Lines of a pipe are messages, too. Then it exits 1 if a
    request failed.
    """

    RUN: ClassVar = "chat:run_chat"

    url: UrlOption = URL
    api_key: ClientKeyOption = None
    model: Annotated[str, Option(metavar="NAME", help="Model to talk to. Default: the first one that is served.")] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCommand:
    """Print the cached blocks of each worker at the journal's end, as `kv.blocks_stored` events.

    Each event is a line of JSON, in the form of topic `kv-events`: hashes are base64 of little-endian u64. Each rank's
    events are numbered from 1. Applied to an empty index, they restore the same index.
    """

    RUN: ClassVar = "index:run_dump"

    recording: Recording
    worker: Annotated[str, Option(help="Print only the blocks of this worker.")] = ""
    allow_policy: AllowPolicyOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsCreateCommand:
    """Create missing topics, and check the existing ones. Existing topics stay as they are."""

    RUN: ClassVar = "topics:run_create"

    kafka: KafkaOptions
    plan: TopicPlanOptions
    pool: Annotated[list[str] | None, Option(help="Pool that gets a work topic. Repeatable.")] = None
    upgrade: Annotated[
        bool, Option("--upgrade", help="Create the topics that a new version needs, sized as the existing ones.")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsListCommand:
    """List every topic partition that has records, with its end offset, and its first offset if retention moved it.

    With --lag, lists the readers instead: the commits of consumer groups, and the journals of owners and standbys.
    After the table, one line per group names its owner and its standby routers.
    """

    RUN: ClassVar = "topics:run_list"

    source: Source
    lag: Annotated[
        bool, Option("--lag", help="Show by how many records each reader on Kafka is behind, and who owns each group.")
    ] = False
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsTailCommand:
    """Print records as JSON lines."""

    RUN: ClassVar = "topics:run_tail"

    where: Annotated[
        list[str], Argument(metavar="[LOG] TOPIC", help="LOG: log file; omit with --kafka. TOPIC: topic name.")
    ]
    source: KafkaSource
    partition: Annotated[int, Option("--partition", short="-p", min=0, help="Partition of the topic.")] = 0
    count: Annotated[int, Option("--limit", short="-n", min=0, help="Print the newest N records.")] = 10
    offset: Annotated[
        int | None, Option(min=0, help="Print the records from this offset on, instead of the last N.")
    ] = None
    follow: Annotated[bool, Option("--follow", short="-f", help="Keep printing new records.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsAclsCommand:
    """List the permissions that each kind of process needs on topics and consumer groups, as ACLs of Kafka.

    The table needs no broker. A `*` at the end of a name stands for any rest of it.
    """

    RUN: ClassVar = "topics:run_acls"

    kafka: KafkaOptions
    user: Annotated[
        list[str] | None,
        Option(
            metavar="ROLE=NAME",
            help="Kafka user of a role. Default: the name of the role. Repeatable, also for several users of a role.",
        ),
    ] = None
    apply: Annotated[bool, Option("--apply", help="Create the ACLs on the broker. Existing ACLs stay.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLettersListCommand:
    """List dead letters, newest first, or show one with its record, and whether it can be retried."""

    RUN: ClassVar = "dead_letters:run_list"

    source: Source
    letter: Annotated[
        str, Option(metavar="LETTER", help="Show only this letter, with its record, as PARTITION/OFFSET.")
    ] = ""
    topic: Annotated[str, Option(help="Only records of this topic.")] = ""
    start: Annotated[str, Option("--from", metavar="TIME", help=f"Only letters since TIME: {TIMES_HELP}.")] = ""
    end: Annotated[str, Option("--to", metavar="TIME", help="Only letters before TIME.")] = ""
    limit: Annotated[int, Option(short="-n", min=1, max=10_000, help="Print the newest N letters.")] = 50
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLettersRetryCommand:
    """Append the record of a dead letter to its topic again, if it decodes in this version.

    The letter is marked as retried, and cannot be retried a second time. The records of some topics are never appended
    again, because they are stale. Stop `forebay up` before you retry a letter of its log file. Exits 1 if the letter is
    refused.
    """

    RUN: ClassVar = "dead_letters:run_retry"

    where: Annotated[
        list[str],
        Argument(
            metavar="[LOG] LETTER",
            help="LOG: log file of `forebay up`; omit with --kafka. LETTER: PARTITION/OFFSET, as `list` prints it.",
        ),
    ]
    source: KafkaSource
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCommand:
    """Record a slice of a log into OUT, including everything needed to derive its decisions again.

    The same command resumes an interrupted recording; an anonymised one starts again. Exits 1 if a decision cannot be
    derived again; the recording is kept for analysis.
    """

    RUN: ClassVar = "record:run_record"

    where: Annotated[
        list[str],
        Argument(metavar="[LOG] OUT", help="LOG: log file or recording; omit with --kafka. OUT: the new recording."),
    ]
    kafka: KafkaSource
    start: Annotated[
        str, Option("--from", metavar="TIME", help=f"Record decisions from this time on: {TIMES_HELP}.")
    ] = ""
    end: Annotated[str, Option("--to", metavar="TIME", help="Record decisions before this time.")] = ""
    last: Annotated[
        str,
        Option(
            "--last",
            metavar="DURATION",
            help="Record only the most recent DURATION up to the newest decision, for example 90s, 5m or 2h.",
        ),
    ] = ""
    group: Annotated[list[str] | None, Option(help="Record this model. Repeatable. Default: all models.")] = None
    check: Annotated[bool, Option("--verify", help="Derive the recorded decisions again and compare them.")] = True
    anonymize: Annotated[bool, Option("--anonymize", help="Remove client content; every decision stays the same.")] = (
        False
    )
    allow_policy: AllowPolicyOption = None
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreCommand:
    """Create a namespace on Kafka with the groups and settings of a recorded log.

    The namespace must have no records. Restored are groups, and the pools, policies, thresholds, disaggregation
    settings, routing rules, canaries and drains of each group. Workers, requests and caches are not restored: workers
    join again.
    """

    RUN: ClassVar = "restore:run_restore"

    recording: Annotated[Path, Argument(help="Recording, or log file of `forebay up`.")]
    kafka: KafkaOptions
    plan: TopicPlanOptions
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowCommand:
    """Report for every decision of a running system what another policy or configuration would decide.

    The shadow is a separate process that only reads the log. On Kafka it writes its events to topic `shadow`, and
    nowhere else. It runs until stopped. Started again under the same name on Kafka, it resumes at its last position.
    Exits 1 if a recorded decision cannot be derived again.
    """

    RUN: ClassVar = "shadow:run_shadow"

    given: AlternativeOptions
    name: Annotated[
        str,
        Option("--id", help="Name by which a restart on Kafka resumes the shadow. Default: a hash of the alternative."),
    ] = ""
    from_start: Annotated[
        bool,
        Option(
            "--from-start",
            help="Begin at the first decision in the journal instead of the next new one."
            " No effect on a shadow that has run before, which resumes.",
        ),
    ] = False
    allow_policy: AllowPolicyOption = None
    json: JsonOption = False
    recording: Recording
    service: ServiceOptions
    logs: LoggingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceCommand:
    """Send requests through the Kafka API. With --wait, exits 1 if a response is missing or an error.

    After Ctrl-C, or if Kafka fails, prints how many requests were sent and answered.
    """

    RUN: ClassVar = "produce:run_produce"

    file: Annotated[Path, Argument(help="JSON lines with one request body each; - for standard input.")]
    kafka: KafkaOptions
    wait: Annotated[bool, Option("--wait", help="Print each response as a JSON line.")] = False
    timeout_s: Annotated[float, Option(min=0.001, help="Seconds to wait after the last request.")] = 600.0
    signing_key: Annotated[
        Path | None,
        Option(metavar="FILE", help="Sign the requests with the key of `forebay keys create --signing` in FILE."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BillShowCommand:
    """Print what tenants have used in a month, per API key and model.

    The ledger has the usage. From a log without a ledger, the usage is derived.
    """

    RUN: ClassVar = "bill:run_show"

    source: Source
    tenant: Annotated[str | None, Option(help="Only this tenant; '' for requests without a tenant.")] = None
    month: Annotated[str, Option(metavar="YYYY-MM", help="Month in UTC. Default: this month.")] = ""
    csv: Annotated[bool, Option("--csv", help="Print CSV with a line of column names.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BillVerifyCommand:
    """Check the ledger: its chain of hashes, and its usage, derived again where the log still has the journal.

    Exits 1 if there is a difference, and names the first one.
    """

    RUN: ClassVar = "bill:run_verify"

    source: Source
    anchor: Annotated[
        Path | None,
        Option(metavar="FILE", help="Output of an earlier `verify --json`, whose records the chain must have."),
    ] = None
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelListCommand:
    """List the stored model cards, newest first, and the aliases."""

    RUN: ClassVar = "models:run_list"

    kafka: KafkaOptions
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRemoveCommand:
    """Remove a model that has no workers, with its stored cards, or one older card of a model.

    The control partition of the model is free for another one. Its records stay until retention removes them. Cards
    that workers use are not removed. Workers remove the older cards of their model themselves.
    """

    RUN: ClassVar = "models:run_remove"

    name: Annotated[str, Argument(metavar="NAME|DIGEST", help="Model, or the first 8 or more digits of a digest.")]
    kafka: KafkaOptions
    force: Annotated[bool, Option("--force", help="Remove cards although kept answers may need them.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAliasCommand:
    """Let requests name a model by an alias, or divide the requests of an alias between models by weight.

    Running ingresses apply the change as soon as they read it. Requests in flight stay on their model.
    """

    RUN: ClassVar = "models:run_alias"

    name: Annotated[str, Argument(metavar="ALIAS", help="Name that requests use.")]
    targets: Annotated[
        list[str] | None, Argument(metavar="MODEL[=WEIGHT]...", help="Models of the requests. Default weight: 1.")
    ] = None
    fallback: Annotated[
        str, Option(metavar="MODEL", help="Model for all requests while no worker of the others is ready.")
    ] = ""
    remove: Annotated[bool, Option("--remove", help="Remove the alias.")] = False
    force: Annotated[bool, Option("--force", help="Set the alias although a model is unknown.")] = False
    operator: OperatorOption = ""
    kafka: KafkaOptions


LIMIT_MAX = 10**15  # requests or tokens


@dataclass(frozen=True, slots=True)
class KeyStoreOptions(KafkaOptions):
    file: Annotated[
        Path | None, Option(help="File for --api-key-file of `up` and `ingress`, instead of the topic `keys` on Kafka.")
    ] = None


def _limit(text: str) -> Option:
    return Option(min=1, max=LIMIT_MAX, help=f"Maximum {text}. Default: no limit.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysCreateCommand:
    """Create an API key of a tenant, and print it on stdout. Only a hash of the key is stored.

    Ingresses accept the key as soon as they have read it from the topic, or within a second from the file.
    """

    RUN: ClassVar = "keys:run_create"

    tenant: Annotated[str, Option(help="Tenant that owns the key.")]
    models: Annotated[
        list[str] | None,
        Option(metavar="MODEL", help="Model, adapter or alias that the key may use. Repeatable. Default: all."),
    ] = None
    rpm: Annotated[int | None, _limit("requests per minute")] = None
    tpm: Annotated[int | None, _limit("tokens per minute, of prompts and outputs")] = None
    in_flight: Annotated[int | None, _limit("requests at the same time")] = None
    budget_day: Annotated[int | None, _limit("tokens per day in UTC")] = None
    budget_month: Annotated[int | None, _limit("tokens per month in UTC")] = None
    weight: Annotated[
        int, Option(min=1, max=TENANT_WEIGHT_MAX, help="Share in the router's queue, relative to other tenants.")
    ] = 1
    priority: Annotated[
        list[str] | None,
        Option(
            metavar="CLASS",
            help="Queue class of the requests. Repeatable: the first one is the default, and clients may name the"
            " others. Default: the default class of the pool.",
        ),
    ] = None
    expires: Annotated[
        str,
        Option(
            metavar="TIME",
            help="Time from which on the key is rejected, as 2027-01-31T12:00:00Z (local time without a zone), or after"
            " a duration such as 90d. Default: never.",
        ),
    ] = ""
    signing: Annotated[
        bool,
        Option("--signing", help="Create a key that signs records of the Kafka API, and print its private key as PEM."),
    ] = False
    cache_namespace: Annotated[
        str,
        Option(metavar="NAME", help="Keys with the same namespace share cached blocks. Default: name of the tenant."),
    ] = ""
    store: KeyStoreOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysListCommand:
    """List the API keys of tenants, oldest first, also those that are revoked or have expired."""

    RUN: ClassVar = "keys:run_list"

    store: KeyStoreOptions
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysRevokeCommand:
    """Revoke an API key of a tenant. Every ingress rejects it within 2 s; requests in flight are completed."""

    RUN: ClassVar = "keys:run_revoke"

    key_id: Annotated[str, Argument(metavar="KEY_ID", help="Id of the key, as `forebay keys list` prints it.")]
    store: KeyStoreOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetCommand:
    """Delete the API keys and the kept answers of a tenant on Kafka, and list what remains where, and until when.

    Ingresses may run meanwhile. They reject the keys within 2 s, and serve the answers no more.
    """

    RUN: ClassVar = "forget:run_forget"

    tenant: Annotated[str, Option(help="Name of the tenant.")]
    kafka: KafkaOptions
    yes: Annotated[bool, Option("--yes", help="Do not ask for confirmation.")] = False


PlaceArgument = Annotated[
    str,
    Argument(
        metavar="LOCATION",
        help="Directory of a disk or store of --kv-tier, or s3://BUCKET/PREFIX with boto3's credentials.",
    ),
]


IdentityOption = Annotated[
    str, Option(metavar="DIGITS", help="Only blocks of the identity that begins with DIGITS, as `list` prints it.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersListCommand:
    """List the identities in a store: model, rank and layout, blocks by the time of last use, bad files in quarantine.

    Workers share blocks if model, rank and layout are equal. Blocks of an identity that no worker has any more are
    useless. In a bucket, the time of last use is that of the write, because S3 does not record reads.
    """

    RUN: ClassVar = "tiers:run_list"

    place: PlaceArgument
    identity: IdentityOption = ""
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersVerifyCommand:
    """Read every block and verify its name, its identity and its checksums. Exits 1 if a block is bad.

    Workers may use the store meanwhile. They verify every block themselves, so bad blocks cost time, but never change
    an answer. Blocks of an identity without a description count as bad, but are never moved to the quarantine: the next
    worker with this identity describes it again.
    """

    RUN: ClassVar = "tiers:run_verify"

    place: PlaceArgument
    identity: IdentityOption = ""
    quarantine: Annotated[bool, Option("--quarantine", help="Move bad files to the quarantine.")] = False
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersPurgeCommand:
    """Remove blocks, by identity, by age, or all. Quarantined files are removed too.

    Workers may use the store meanwhile. They notice removed blocks as misses.
    """

    RUN: ClassVar = "tiers:run_purge"

    place: PlaceArgument
    identity: IdentityOption = ""
    end: Annotated[str, Option("--to", metavar="TIME", help=f"Only blocks last used before TIME: {TIMES_HELP}.")] = ""
    everything: Annotated[bool, Option("--all", help="All blocks of all identities.")] = False
    yes: Annotated[bool, Option("--yes", help="Do not ask for confirmation.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigCommand:
    """Show the options of a command and where their values come from: a flag, a variable, a file or the default.

    The command does not run. Secrets are masked.
    """

    RUN: ClassVar = "config:run_config"

    command: Annotated[str, Argument(help="Command, for example up.")]
    options: Annotated[
        list[str] | None, Argument("[SUBCOMMAND] [OPTIONS]", takes_options=True, help="Its subcommand and its options.")
    ] = None
    json: JsonOption = False


CONCURRENCY_MAX = 4_000  # a system that falls behind delays the trace instead of exhausting sockets


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCommand:
    """Play a recorded or synthetic workload into a running system.

    Exits 1 if a request failed, 2 if the system does not respond at the start. Ctrl-C prints the results so far and
    exits 130.
    """

    RUN: ClassVar = "trace.run:run_trace"

    workload: Annotated[str, Argument(help="A file, or synthetic:SETTINGS. See docs/workloads.md.")]
    speed: Annotated[
        float, Option(min=0.001, max=1e6, help="Divide the times between arrivals by this number. Think times stay.")
    ] = 1.0
    url: Annotated[
        list[str] | None,
        Option(
            metavar="URL", help="URL of the running system. Repeatable; the URLs share the requests.", default_text=URL
        ),
    ] = None
    api_key: ClientKeyOption = None
    duration_s: Annotated[float | None, Option(min=0.001, help="Play only the first SECONDS of the workload.")] = None
    max_concurrency: Annotated[
        int, Option(min=1, max=CONCURRENCY_MAX, help="Maximum number of requests in flight.")
    ] = CONCURRENCY_MAX
    skip_bad_rows: Annotated[
        bool, Option("--skip-bad-rows", help="Skip and count unusable rows instead of failing.")
    ] = False
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCommand:
    """Call an endpoint of a component, and print each value that it yields as a JSON line.

    Exits 1 if the call fails, 2 if the endpoint is unknown or the argument is invalid.
    """

    RUN: ClassVar = "call:run_call"

    name: Annotated[str, Argument(help="The endpoint, NAMESPACE.COMPONENT.ENDPOINT.")]
    payload: Annotated[str, Argument(help="Its argument as JSON; - for standard input.")] = "null"
    url: UrlOption = URL
    api_key: ClientKeyOption = None


PROFILED_TOKENS_MAX = 1 << 22
PROFILED_CONCURRENCY_MAX = 4_096
PROFILED_VALUES_MAX = 64
NUMBER = re.compile(r"[1-9][0-9]{0,6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRunCommand:
    """Measure TTFT, inter-token latency and throughput of a live worker.

    The worker must serve no other requests meanwhile. The file is written after each point: the same command continues
    an interrupted run. Exits 1 if the system stops serving requests.
    """

    RUN: ClassVar = "profiler.run:run_profile"

    out: Annotated[Path, Option("--out", short="-o", help="JSON file for the measured points.")]
    url: Annotated[str, Option(help="URL of the running system.")] = URL
    api_key: ClientKeyOption = None
    model: Annotated[str, Option(metavar="NAME", help="Model name in the API, if there are several.")] = ""
    worker: Annotated[
        str, Option(help="Id of the worker, if there are several; requires an ingress with --routing-hints.")
    ] = ""
    role: Annotated[
        Literal["aggregated", "prefill", "decode"], Option(help="Stages of requests that the worker computes.")
    ] = "aggregated"
    isl: Annotated[str, Option(metavar="N,N,...", help="Prompt lengths in tokens.")] = "128,512,2048,8192"
    context: Annotated[str, Option(metavar="N,N,...", help="Context lengths of decode in tokens.")] = "512,2048,8192"
    concurrency: Annotated[str, Option(metavar="N,N,...", help="Numbers of concurrent requests of decode.")] = (
        "1,4,16,64"
    )
    output_tokens: Annotated[int, Option(min=8, max=4_096, help="Output tokens per request to measure decode.")] = 64
    repeats: Annotated[int, Option(min=1, max=100, help="Measurements per point; the median counts.")] = 3
    timeout_s: Annotated[float, Option(min=0.1, max=86_400, help="Seconds after which a point is left out.")] = 300.0


CONSOLE_PORT = 8100


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleCommand:
    """Serve a web page that shows a log, live or at any moment of the past.

    The console follows the log and writes nothing to it. LOG may be the log of a running `forebay up`.
    """

    RUN: ClassVar = "console.run:run_console"

    recording: Recording
    port: Annotated[int, Option(min=1, max=65535, help="HTTP port.")] = CONSOLE_PORT
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1"
    allow_host: Annotated[list[str] | None, Option(help="Additional allowed value of the Host header. Repeatable.")] = (
        None
    )
    ssl_certfile: Annotated[Path | None, Option(help="Serve HTTPS with this certificate, a PEM file.")] = None
    ssl_keyfile: Annotated[
        Path | None, Option(help="Private key of the certificate. Default: the key in --ssl-certfile.")
    ] = None
    token_file: Annotated[
        Path | None,
        Option(
            help="File with the token that clients must send. Default: environment variable FOREBAY_CONSOLE_TOKEN, or a"
            " random token.",
            has_variable=False,  # FOREBAY_TOKEN_FILE names the token of the admin API
        ),
    ] = None
    ingress: Annotated[
        str | None,
        Option(
            "--url",
            metavar="URL",
            help="Ingress with an admin API, through which operators change the system.",
            has_variable=False,  # a variable for `status` must not attach a console of a recording to a live system
        ),
    ] = None
    trace_url: Annotated[
        str,
        Option(metavar="URL", help="Address of a trace, to which requests link: http://jaeger:16686/trace/{trace_id}."),
    ] = ""
    cache_dir: Annotated[
        Path | None,
        Option(help="Folder for the catalog. Default: the folder of LOG; with --kafka, the user's cache folder."),
    ] = None
    allow_policy: AllowPolicyOption = None
    logs: LoggingOptions
