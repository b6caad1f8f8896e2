"""Benchmark of two gateways that users would otherwise pick, smg and LiteLLM, under the load of `bench http`.

Neither routes by a model of its own: both forward requests to OpenAI-compatible servers. So the benchmark starts
stand-in servers, which tokenize nothing and answer at once, or with one token per step at engine speed 1. The measured
CPU time is that of the gateway and of the stand-ins. forebay and Dynamo also tokenize, and run mock engines: their
values are those of `bench http` and `bench kafka`.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_http import CASES, HEADER, STEADY_CASES, load, medians

FIRST_SERVER, SERVERS = 18_300, 4
GATEWAY = 18_290
SMG_METRICS = 18_291
READY_S = 60.0
STEP_S = 0.008  # of a stand-in for the cases in which each token is an event of its own
MODEL = "tiny"


async def serve(port: int, step_s: float) -> None:
    """Answer each POST with a stream of `max_tokens` chunks, and each GET with the list of models."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
                body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
                if head.startswith(b"POST"):
                    await _answer(writer, json.loads(body), step_s)
                else:
                    text = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                    writer.write(b"content-length: %d\r\n\r\n%s" % (len(text), text))

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    await server.serve_forever()


async def _answer(writer: asyncio.StreamWriter, request: dict[str, Any], step_s: float) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    count = request.get("max_tokens") or 1
    for number in range(count):
        if step_s:
            await asyncio.sleep(step_s)
        # LiteLLM ends a stream that repeats a chunk a hundred times.
        _event(writer, {"content": f" {number}"}, "length" if number == count - 1 else None)
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def _event(writer: asyncio.StreamWriter, delta: dict[str, str], finish_reason: str | None) -> None:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    text = (
        b"data: %s\n\n"
        % json.dumps(
            {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": [choice]}
        ).encode()
    )
    writer.write(b"%x\r\n%s\r\n" % (len(text), text))


@contextmanager
def running(command: list[str], folder: Path, name: str) -> Iterator[int]:
    """Run a process, and yield its pid. Its output goes to a file in `folder`."""
    with (folder / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def commands(smg: str | None, litellm: str | None, urls: list[str], folder: Path) -> dict[str, list[str]]:
    """Return the command of each gateway that is installed."""
    found = {}
    if smg:
        options = ["--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(GATEWAY)]
        options += ["--prometheus-port", str(SMG_METRICS)]
        found["smg"] = [smg, "launch", "--worker-urls", *urls, *options]
    if litellm:
        models = [
            {
                "model_name": MODEL,
                "litellm_params": {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "unused"},
            }
            for url in urls
        ]
        config = folder / "litellm.yaml"  # JSON is YAML
        settings = {
            "model_list": models,
            "router_settings": {"routing_strategy": "least-busy"},
            # It refuses to start without a key otherwise. The other measured systems check no key either.
            "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
        }
        config.write_text(json.dumps(settings))
        found["LiteLLM"] = [litellm, "--config", str(config), "--host", "127.0.0.1", "--port", str(GATEWAY)]
    return found


def wait_ready(folder: Path, name: str) -> None:
    """Wait until the gateway streams a response. Raises SystemExit if it does not."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "stream": True}
    url, ends_s = f"http://127.0.0.1:{GATEWAY}/v1/chat/completions", time.monotonic() + READY_S
    while time.monotonic() < ends_s:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as response:
            if b"[DONE]" in response.read():
                return
        time.sleep(0.5)
    raise SystemExit(f"{name} is not ready: {(folder / f'{name}.log').read_text()[-2000:]}")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smg", help="program `smg` (pip install smg)")
    parser.add_argument("--litellm", help="program `litellm` (pip install 'litellm[proxy]')")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, help="requests per case and round, instead of those of `http`")
    parser.add_argument("--serve", nargs=2, metavar=("PORT", "STEP_S"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(int(args.serve[0]), float(args.serve[1])))
        return
    if not args.smg and not args.litellm:
        parser.error("no gateway: give --smg PROGRAM, --litellm PROGRAM or both")
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as text:
        for _ in range(args.rounds):
            for step_s, cases in ((0.0, CASES), (STEP_S, STEADY_CASES)):
                for name, case, result in _round(args, Path(text), step_s, cases):
                    results.setdefault((name, case), []).append(result)
    print(f"| case | gateway | {HEADER} | of this CPU, gateway |\n|---|---|{'---|' * (HEADER.count('|') + 2)}")
    for (name, case), measured in sorted(results.items(), key=lambda item: item[0][1]):
        own = statistics.median(one["cpu_us_per_request"]["gateway"] for one in measured)
        print(f"| {case} | {name} | {medians(measured).cells()} | {own:.0f} |")


def _round(
    args: argparse.Namespace, folder: Path, step_s: float, cases: dict[str, list[str]]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    ports = range(FIRST_SERVER, FIRST_SERVER + SERVERS)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        server = [sys.executable, "-m", "tests.benchmarks", "gateways", "--serve"]
        started = [running([*server, str(port), str(step_s)], folder, f"server-{port}") for port in ports]
        servers = ",".join(str(stack.enter_context(one)) for one in started)
        for name, command in commands(args.smg, args.litellm, urls, folder).items():
            with running(command, folder, name) as pid:
                wait_ready(folder, name)
                pids = f"gateway={pid}," + ",".join(f"server={one}" for one in servers.split(","))
                for case, options in cases.items():
                    sys.stderr.write(f"{name}: {case}\n")
                    count = [] if args.requests is None else ["--requests", str(args.requests)]
                    yield name, case, load(f"http://127.0.0.1:{GATEWAY}", pids, [*options, *count])


if __name__ == "__main__":
    main()
