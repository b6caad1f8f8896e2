"""The command line: `forebay up`, the same services as separate processes, and tools."""

import errno
import os
import sys

import click

from forebay.cli.common.command_class import EPILOG, CliGroup, Subcommands

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HELP = "Event-sourced serving of large language models. Every state change and every decision is an event."

# Each command is declared by a class, `module:Class` relative to `forebay.cli`. The help of a command is its docstring.
COMMANDS: dict[str, dict[str, str | Subcommands]] = {
    "Run a system": {
        "up": "processes.command:UpCommand",
        "ingress": "processes.command:IngressCommand",
        "picker": "processes.command:PickerCommand",
        "router": "processes.command:RouterCommand",
        "worker": "processes.command:WorkerCommand",
        "indexer": "processes.command:IndexerCommand",
        "ledger": "processes.command:LedgerCommand",
        "spans": "processes.command:SpansCommand",
        "serve": "processes.command:ServeCommand",
    },
    "Look": {
        "chat": "command:ChatCommand",
        "status": "command:StatusCommand",
        "explain": "replay.command:ExplainCommand",
        "console": "command:ConsoleCommand",
        "topics": Subcommands(
            "Show the records of a log, and manage the topics of a broker.",
            {
                "create": "command:TopicsCreateCommand",
                "list": "command:TopicsListCommand",
                "tail": "command:TopicsTailCommand",
                "acls": "command:TopicsAclsCommand",
            },
        ),
        "dead-letters": Subcommands(
            "List records that did not decode or were rejected, and retry them.",
            {"list": "command:DeadLettersListCommand", "retry": "command:DeadLettersRetryCommand"},
        ),
        "index": "command:IndexCommand",
        "config": "command:ConfigCommand",
    },
    "Replay": {
        "verify": "replay.command:VerifyCommand",
        "replay": Subcommands(
            "Show recorded states, and compare recorded decisions with others.",
            {
                "at": "replay.command:AtCommand",
                "diff": "replay.command:DiffCommand",
            },
        ),
        "record": "command:RecordCommand",
        "restore": "command:RestoreCommand",
        "shadow": "command:ShadowCommand",
    },
    "Simulate and measure": {
        "simulate": "simulate.command:SimulateCommand",
        "sweep": "simulate.command:SweepCommand",
        "fit": "simulate.command:FitCommand",
        "profile": Subcommands(
            "Measure a live worker.",
            {"run": "command:ProfileRunCommand"},
        ),
        "workload": Subcommands(
            "Inspect and convert workloads.",
            {"show": "simulate.command:WorkloadShowCommand", "convert": "simulate.command:WorkloadConvertCommand"},
        ),
        "trace": "command:TraceCommand",
        "call": "command:CallCommand",
        "produce": "command:ProduceCommand",
    },
    "Operate": {
        "bill": Subcommands(
            "Print what tenants have used, and verify the ledger.",
            {
                "show": "command:BillShowCommand",
                "verify": "command:BillVerifyCommand",
            },
            default="show",
        ),
        "control": Subcommands(
            "Send commands to workers or change routing settings. Exits 1 on failure.",
            {
                "adapters": "control.command:AdaptersCommand",
                "cache": "control.command:CacheCommand",
                "power": "control.command:PowerCommand",
                "drain": "control.command:DrainCommand",
                "pools": "control.command:PoolsCommand",
                "policy": "control.command:PolicyCommand",
            },
        ),
        "planner": Subcommands(
            "Scale the pools of a distributed system.",
            {
                "run": "planner.command:PlannerRunCommand",
                "supervise": "planner.command:PlannerSuperviseCommand",
                "status": "planner.command:PlannerStatusCommand",
                "set": "planner.command:PlannerSetCommand",
            },
        ),
        "model": Subcommands(
            "List and remove model cards, and set aliases of models.",
            {
                "list": "command:ModelListCommand",
                "remove": "command:ModelRemoveCommand",
                "alias": "command:ModelAliasCommand",
            },
        ),
        "keys": Subcommands(
            "Create, list and revoke API keys of tenants.",
            {
                "create": "command:KeysCreateCommand",
                "list": "command:KeysListCommand",
                "revoke": "command:KeysRevokeCommand",
            },
        ),
        "forget": "command:ForgetCommand",
        "tiers": Subcommands(
            "List, verify and purge stored KV blocks.",
            {
                "list": "command:TiersListCommand",
                "verify": "command:TiersVerifyCommand",
                "purge": "command:TiersPurgeCommand",
            },
        ),
    },
}


def _show_version(ctx: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted:
        from forebay.core.world import CORE_VERSION  # noqa: PLC0415 - only this option waits for it
        from forebay.journal.release import own_release  # noqa: PLC0415 - as above

        click.echo(f"forebay {own_release()}, decision rules {CORE_VERSION}")
        ctx.exit()


VERSION = click.Option(
    ["--version"],
    help="Print the version, and that of the decision rules, and exit.",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
)
app = CliGroup("forebay", HELP, COMMANDS, params=[VERSION], epilog=EPILOG)


def main() -> None:
    """Run the command line.

    A full disk ends the process with a one-line error and exit code 1. A closed pipe ends it without a message.
    """
    try:
        app()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        sys.stderr.write(f"forebay: cannot write results: {error.strerror}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard buffered output
        sys.exit(1)
