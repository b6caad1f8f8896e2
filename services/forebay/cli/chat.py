"""`forebay chat`: a conversation with a model of a running system, in a terminal or between pipes."""

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from forebay.cli.command import ChatCommand
from forebay.cli.common.credentials import client_headers
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.failures import Failure, advice, event_failure, status_failure
from forebay.cli.common.terminal import printable
from forebay.cli.control.client import IngressClient
from forebay.events.names import unknown_name
from forebay.processes.notices import complain

if TYPE_CHECKING:
    import httpx

COMMANDS = ("/model", "/explain", "/new", "/quit")
KEPT = frozenset("\n\t\u200c\u200d")  # unprintable characters of answers that cannot harm: several scripts need joiners
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
CONNECT_S = 10.0
READ_S = 60.0  # the ingress sends a comment at least every 10 s
OK = 200


class ChatError(Exception):
    """A request failed, or a command is invalid. The conversation continues."""


def run_chat(options: ChatCommand) -> None:
    import httpx  # noqa: PLC0415 - takes 200 ms, which --help does not wait for

    with explained():
        headers = client_headers(options.api_key)
    found = IngressClient(options.url, headers).call("/v1/models", "data")["data"]
    models = [str(card["id"]) for card in found]
    if not models:
        fail(f"{options.url} serves no model yet; wait until a worker has joined, or check --url", 1)
    model = options.model or models[0]
    if model not in models:
        fail(unknown_name("model", model, models))
    screen = Screen(is_terminal=sys.stdin.isatty() and sys.stdout.isatty())
    timeout = httpx.Timeout(CONNECT_S, read=READ_S)
    with httpx.Client(base_url=options.url.rstrip("/"), headers=headers, timeout=timeout) as client:
        if Chat(client, model, screen).run() and not screen.is_terminal:
            raise click.exceptions.Exit(1)


class Screen:
    """Reads lines, and shows answers. Without a terminal it writes answers only, without reasoning and styles."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self._has_styles = is_terminal and os.environ.get("TERM") != "dumb"
        self._is_dim = False
        self._last = "\n"
        if is_terminal:
            import readline  # noqa: F401, PLC0415 - `input` then edits lines and has a history
        else:
            for stream in (sys.stdin, sys.stdout):
                if hasattr(stream, "reconfigure"):
                    stream.reconfigure(errors="replace")

    def read(self) -> str | None:
        """Return the next line, empty after Ctrl-C in a terminal, None at the end of the input."""
        try:
            return input("> " if self.is_terminal else "")
        except EOFError:
            if self.is_terminal:
                click.echo()
            return None
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise
            click.echo()
            return ""

    def note(self, text: str) -> None:
        """Show a line about the conversation, only in a terminal."""
        if self.is_terminal:
            click.echo(printable(text))

    def write(self, text: str, *, is_dim: bool = False) -> None:
        """Show the next part of an answer, or of its reasoning (`is_dim`), which begins a new line after the other."""
        if not text or (is_dim and not self.is_terminal):
            return
        if is_dim != self._is_dim:
            self.end()
            self._is_dim = is_dim
            sys.stdout.write(DIM if is_dim and self._has_styles else "")
        sys.stdout.write("".join(one if one in KEPT else printable(one) for one in text))
        sys.stdout.flush()
        self._last = text[-1]

    def end(self) -> None:
        """End the line and the style."""
        sys.stdout.write(PLAIN if self._is_dim and self._has_styles else "")
        sys.stdout.write("" if self._last == "\n" else "\n")
        sys.stdout.flush()
        self._is_dim, self._last = False, "\n"


class Chat:
    """A conversation: the turns so far, and the id of the last request."""

    def __init__(self, client: "httpx.Client", model: str, screen: Screen) -> None:
        self._client = client
        self._model = model
        self._screen = screen
        self._turns: list[dict[str, str]] = []
        self._request_id = ""

    def run(self) -> bool:
        """Answer lines until the end of the input. Return whether a request or a command failed."""
        import httpx  # noqa: PLC0415 - as above

        has_failed = False
        self._screen.note(f"{self._model} on {self._client.base_url}; {', '.join(COMMANDS)}; Ctrl-D ends")
        while (line := self._screen.read()) is not None and line.strip() != "/quit":
            try:
                self._respond(line)
                continue
            except ChatError as error:
                text = str(error)
            except (httpx.TransportError, httpx.InvalidURL) as error:
                text = f"{self._client.base_url} does not respond ({error!r}); {advice(error)}"
            except (msgspec.MsgspecError, ValueError, LookupError, TypeError, AttributeError) as error:
                text = f"{self._client.base_url} sent an unexpected response ({error}); check --url and its version"
            except KeyboardInterrupt:
                if not self._screen.is_terminal:
                    raise
                text = "cancelled"
            self._screen.end()
            complain(printable(text))  # on one line
            has_failed = True
        return has_failed

    def _respond(self, line: str) -> None:
        command, _, argument = line.strip().partition(" ")
        match command:
            case "":
                pass
            case "/new":
                self._turns, self._request_id = [], ""
            case "/model":
                self._choose(argument.strip())
            case "/explain":
                self._explain()
            case _ if command.startswith("/"):
                raise ChatError(unknown_name("command", command, COMMANDS))
            case _:
                self._answer(line)

    def _choose(self, name: str) -> None:
        models = [str(card["id"]) for card in self._get("/v1/models")["data"]]
        if not name:
            for model in models:
                click.echo(printable(f"{'*' if model == self._model else ' '} {model}"))
        elif name not in models:
            raise ChatError(unknown_name("model", name, models))
        else:
            self._model = name

    def _explain(self) -> None:
        from forebay.cli.common.tables import results  # noqa: PLC0415 - answers do not wait for rich and the core
        from forebay.cli.replay.explain import show  # noqa: PLC0415
        from forebay.replay.explain.explanation import Explanation  # noqa: PLC0415

        if not self._request_id:
            raise ChatError("there is no answer to explain yet; send a message first")
        found = self._get(f"/v1/requests/{self._request_id}/explain")
        show(results(), msgspec.convert(found, Explanation), everything=False)

    def _get(self, path: str) -> Any:
        response = self._client.get(path)
        if response.status_code != OK:
            raise _failed(status_failure(response.status_code, response.content))
        return response.json()

    def _answer(self, text: str) -> None:
        """Send a message, and show the answer as it arrives. A message without any answer is not kept."""
        message = {"role": "user", "content": text.encode(errors="replace").decode()}
        body = {"model": self._model, "messages": [*self._turns, message], "stream": True}
        parts: list[str] = []
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != OK:
                    raise _failed(status_failure(response.status_code, response.read()))
                for delta in self._deltas(response):
                    parts.append(delta.get("content") or "")  # first, because Ctrl-C may end the next lines
                    self._screen.write(delta.get("reasoning_content") or "", is_dim=True)
                    self._screen.write(parts[-1])
        finally:  # also after Ctrl-C, so that a partial answer is part of the conversation
            if answer := "".join(parts):
                self._turns += [message, {"role": "assistant", "content": answer}]
        self._screen.end()

    def _deltas(self, response: "httpx.Response") -> Iterator[Any]:
        """Yield the deltas of a stream. Raises ChatError for an error event."""
        rest = b""
        for part in response.iter_bytes():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data: ")
                if data is not line and data != b"[DONE]":
                    event = msgspec.json.decode(data)
                    if "error" in event:
                        raise _failed(event_failure(data))
                    self._request_id = event["id"]
                    yield from (choice["delta"] for choice in event["choices"])


def _failed(failure: Failure) -> ChatError:
    return ChatError(f"{failure.kind}: {failure.text}")
