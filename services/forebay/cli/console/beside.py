"""Process of `forebay up --console`: a console that ends with its parent.

`forebay.ingress.child_process` describes the messages; the first message has the settings of the console.
"""

import sys

import click
import msgspec

from forebay.cli.common.logs import LoggingOptions
from forebay.cli.console.run import serve_until_signal
from forebay.console.settings import ConsoleSettings
from forebay.ingress.child_process import ChildConnection


def main() -> None:
    """Serve the console until the parent ends."""
    connection = ChildConnection()
    connection.end_with_parent()
    LoggingOptions().start(("forebay.live", "forebay.transport"))
    try:
        serve_until_signal(msgspec.json.decode(connection.setup, type=ConsoleSettings), "--console-port")
    except click.exceptions.Exit as error:  # the message is printed; no command runs here
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
