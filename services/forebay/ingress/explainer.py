"""Explanations for an ingress, made in a process of their own: one, started at the first question.

Deriving takes a second or more of a CPU. The process reads the log by itself; it is killed when it takes too long or
the ingress stops, and ends by itself when the ingress is gone.
"""

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from forebay.ingress.errors import ApiError
from forebay.ingress.explain_worker import LENGTH_BYTES, ExplainRequest, ExplainResponse, LogSource

LIMIT_S = 30.0  # from a snapshot on some ten thousand decisions; who asks for more has a shell
ASKERS_MAX = 8  # at once, the one whose turn it is among them
ENDS_S = 5.0  # a process that was killed


class Explainer:
    """Explains the requests on one log; None is a log that lies in this process's memory."""

    def __init__(self, source: LogSource | None, limit_s: float = LIMIT_S) -> None:
        self._source = source
        self._limit_s = limit_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._askers = 0
        self._closed = False

    async def explain(self, request_id: str, partition: int) -> bytes:
        """The explanation of a request as JSON, as `forebay.replay.explain.explanation` says. Raises ApiError."""
        if self._source is None:
            text = (
                "the log is in memory, where no other process can read it: start with --log FILE to have it explained"
            )
            raise ApiError(501, "not_recorded", text)
        if self._askers >= ASKERS_MAX:
            raise ApiError(503, "explain_busy", f"{ASKERS_MAX} requests are being explained already")
        self._askers += 1
        try:
            reply = await self._in_turn(self._source, ExplainRequest(request_id, partition))
        finally:
            self._askers -= 1
        if reply.explanation is msgspec.UNSET:
            raise ApiError(reply.status, reply.code, reply.message)
        return bytes(reply.explanation)

    async def close(self) -> None:
        """End the process, whatever it is at, and start none any more."""
        self._closed = True
        await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await asyncio.wait_for(process.wait(), ENDS_S)

    async def _in_turn(self, source: LogSource, question: ExplainRequest) -> ExplainResponse:
        asked = False
        try:
            async with asyncio.timeout(self._limit_s), self._turn:
                if self._closed:
                    raise EOFError
                asked = True
                return await self._ask(source, question)
        except TimeoutError as error:
            if not asked:
                raise ApiError(503, "explain_busy", "other requests are being explained") from error
            text = f"not explained within {self._limit_s:g} s; `forebay replay explain` takes the time that it needs"
            raise ApiError(504, "explain_timeout", text) from error
        except (OSError, EOFError) as error:
            raise ApiError(
                503, "explain_failed", "the process that explains ended; the server's log says why"
            ) from error

    async def _ask(self, source: LogSource, question: ExplainRequest) -> ExplainResponse:
        """One question and its answer. Raises OSError or EOFError when the process is gone."""
        answered = False
        try:
            if self._process is None or self._process.returncode is not None:
                self._process = await _started(source)
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write(msgspec.json.encode(question) + b"\n")
            await stdin.drain()
            length = int.from_bytes(await stdout.readexactly(LENGTH_BYTES), "big")
            reply = msgspec.json.decode(await stdout.readexactly(length), type=ExplainResponse)
            answered = True
        finally:
            if not answered:  # what it may still say would be taken for the next answer
                await self._kill()
        return reply


async def _started(source: LogSource) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "forebay.ingress.explain_worker",
        env=_environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C is for this process, which ends that one
    )
    assert process.stdin is not None
    # Not as an argument: it may hold a password.
    process.stdin.write(msgspec.json.encode(source) + b"\n")
    return process


def _environment() -> dict[str, str]:
    """The same modules as here, and a user's policies; without -P the current directory would come first."""
    found_in = [*(str(Path(entry).absolute()) for entry in sys.path), str(Path.cwd())]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found_in)}
