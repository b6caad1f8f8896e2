"""`make image` runs the built image: as its own user, with a read-only root file system and without capabilities.

Runs `forebay up` with its log in a volume, `forebay verify` on that log, and then a router, a worker and an ingress in
containers of their own, with Kafka and Redis of this machine. Exits 1 unless each system answers a chat, every decision
was derived equal, and every container ends when asked to.
"""

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from infra.kafka.kafka import HOST
from tests.harness.cluster import GROUP, Cluster
from tests.harness.demos import Demo, Place, Result
from tests.harness.local import free_ports
from tests.harness.processes import PATIENCE_S, ProcessError

USER = 65532  # also in the Helm chart
LIMITS = ("--rm", "--network=host", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges")
# Prints the user and the packages of the SBOM that are not installed.
CHECK = """
import json, os
from importlib.metadata import distributions
sbom = json.load(open("/opt/forebay/sbom.cdx.json"))
listed = {(one["name"], one["version"]) for one in sbom["components"]}
found = {(one.name.lower().replace("_", "-"), one.version) for one in distributions()}
print(json.dumps([os.getuid(), os.getgid(), len(listed), sorted(found - listed)]))
"""
DEMO = Demo("image", __doc__)


@dataclass(slots=True, kw_only=True)
class ImageResult(Result):
    """Times are from the start of the first container to the first token, in seconds."""

    bytes: int
    packages: int = 0
    up_s: float = 0.0
    cluster_s: float = 0.0

    def line(self) -> str:
        return (
            f"{self.bytes / 1e6:.0f} MB, {self.packages} packages in the SBOM; start to first token: up"
            f" {self.up_s:.1f} s, router, worker and ingress {self.cluster_s:.1f} s; verified {self.verified} of"
            f" {self.decisions}: {self.verdict}"
        )


async def first_token(url: str) -> float:
    """Send a chat as soon as the server accepts one; return the time of the first token. Raises ProcessError."""
    body = {"model": GROUP, "max_tokens": 8, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    deadline = time.monotonic() + PATIENCE_S
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        while time.monotonic() < deadline:
            try:
                async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                    if response.status_code == httpx.codes.OK:
                        at_s, chunks = 0.0, 0
                        async for line in response.aiter_lines():
                            chunks += '"content":"' in line
                            at_s = at_s or (time.monotonic() if chunks else 0.0)
                        if chunks:
                            return at_s
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.02)
    raise ProcessError(f"{url} has not answered a chat within {PATIENCE_S:g} s")


class Image:
    """An image, and a script in `folder` that runs forebay in a container like the command `forebay`."""

    def __init__(self, name: str, tool: list[str], options: list[str], folder: Path) -> None:
        self._tool, self._name, self._label = tool, name, f"forebay.run={folder.name}"
        volumes = [f"--volume={folder}:{folder}:ro", f"--volume={folder / 'data'}:/data"]
        self.run = [*tool, "run", *LIMITS, f"--label={self._label}", *volumes, *options]
        self.program = folder / "forebay"
        (folder / "data").mkdir()
        (folder / "data").chmod(0o777)
        folder.chmod(0o755)
        self.program.write_text(f'#!/bin/sh\nexec {shlex.join([*self.run, name])} "$@"\n')
        self.program.chmod(0o755)

    def inspect(self) -> tuple[int, int, list[int], list[str]]:
        """Return the image's size, and what the check in a container prints."""
        size = self._output(*self._tool, "image", "inspect", "--format={{.Size}}", self._name)
        user, group, packages, missing = json.loads(
            self._output(*self.run, "--entrypoint=python3", self._name, "-c", CHECK)
        )
        return int(size), packages, [user, group], missing

    def remove_containers(self) -> None:
        left = self._output(*self._tool, "ps", "--all", "--quiet", f"--filter=label={self._label}").split()
        if left:
            self._output(*self._tool, "rm", "--force", *left)

    def _output(self, *command: str) -> str:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ProcessError(f"{shlex.join(command)} ended with code {done.returncode}")
        return done.stdout


async def run(place: Place, options: argparse.Namespace) -> ImageResult:
    image = Image(options.image, shlex.split(options.tool), shlex.split(options.run), place.folder)
    size, packages, ids, missing = image.inspect()
    result = ImageResult(bytes=size, packages=packages)
    if ids != [USER, USER] or missing:
        result.problems.append(f"user and group {ids}; packages that the SBOM lacks: {missing}")
    try:
        async with place.cluster() as cluster:
            await embedded(cluster, image, result)
            await distributed(cluster, image, result)
    finally:
        image.remove_containers()
    return result


async def embedded(cluster: Cluster, image: Image, result: ImageResult) -> None:
    program, port = str(image.program), free_ports(1)
    code, version = await cluster.command("version", "--version", within_s=PATIENCE_S, program=program)
    DEMO.report(f"{version.strip()}, code {code}")
    begin_s = time.monotonic()
    cluster.processes.start("up", [program, "up", "--port", str(port), "--log", "/data/run.db"])
    result.up_s = await first_token(f"http://{HOST}:{port}") - begin_s
    await cluster.processes.stop("up")
    code, out = await cluster.command(
        "verify", "verify", "/data/run.db", "--json", within_s=PATIENCE_S, program=program
    )
    report = json.loads(out)
    if code or not 0 < report["verified"] == report["decisions"]:
        result.problems.append(f"verify ended with code {code}: {report}")


async def distributed(cluster: Cluster, image: Image, result: ImageResult) -> None:
    program = str(image.program)
    begin_s = time.monotonic()
    cluster.router("r1", program=program)
    cluster.worker("w1", program=program)
    url = cluster.ingress("i1", program=program)
    result.cluster_s = await first_token(url) - begin_s
    report = await cluster.verify(program=program)
    result.verified, result.decisions = report["verified"], report["decisions"]
    result.judge_decisions()
    for name in ("i1", "w1", "r1"):
        await cluster.stop(name)


if __name__ == "__main__":
    DEMO.add("image", help="name of the image")
    DEMO.add("--tool", default="podman", help="command of docker or podman (default %(default)s)")
    DEMO.add("--run", default="", help="more options of `docker run` or `podman run`")
    sys.exit(DEMO.run(run))
