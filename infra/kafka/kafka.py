"""Apache Kafka from Maven Central on the loopback address: start, stop, status of one broker.

Needs Java 17 and Maven, no Docker. The jars are fetched once into `.kafka/lib`. A data folder holds everything
of one broker: its records, pid, port, settings and log; several brokers live side by side in folders of their own.
Three ports in a row: clients, controller, and with `--sasl` clients that give a user and password (SASL/PLAIN).
Tests also start clusters of several brokers, whose first broker is the controller of all.
"""

import argparse
import base64
import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
LIB = ROOT / ".kafka" / "lib"
DATA = ROOT / ".kafka" / "data"
HOST = "127.0.0.1"
PORT = 19092
JAVA_MIN = 17
HEAP_MAX = "512m"
STARTED_WITHIN_S = 60.0  # about 4 s when the machine is idle
STOPPED_WITHIN_S = 20.0
ANSWER_WITHIN_S = 1.0
LOG_TAIL_LINES = 15
CLUSTER = base64.urlsafe_b64encode(b"forebay on local").decode().rstrip("=")  # 16 bytes, as Kafka asks
API_VERSIONS = 18


class BrokerError(Exception):
    """The broker cannot be had; the message says why, and what to do."""


@dataclass(frozen=True)
class Broker:
    """Where a broker lives.

    Attributes:
        port: Clients connect here; the controller takes the next port, SASL clients the one after.
        data: Folder of everything that it keeps.
        sasl: User and password of the SASL/PLAIN listener; without, there is none.
        ends_with_starter: Whether the broker is killed when the process that starts it ends (where `setpriv` exists).
        host: The address where it listens, and where it tells clients to come.
        node: Number of the broker in its cluster.
        controller: Port of the cluster's controller, None if this broker is the controller.
        heap: Maximum size of its Java heap.
        settings: More lines for its settings file.
    """

    port: int = PORT
    data: Path = DATA
    sasl: tuple[str, str] | None = None
    ends_with_starter: bool = False
    host: str = HOST
    node: int = 1
    controller: int | None = None
    heap: str = HEAP_MAX
    settings: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """Bootstrap address for clients."""
        return f"{self.host}:{self.port}"

    @property
    def sasl_address(self) -> str:
        """Bootstrap address for clients that log in."""
        return f"{self.host}:{self.port + 2}"

    @property
    def ports(self) -> list[int]:
        """Every port it listens on."""
        return [self.port, self.port + 1] + ([self.port + 2] if self.sasl else [])

    @property
    def properties(self) -> Path:
        """Its settings file, which also tells its process from others."""
        return self.data.resolve() / "server.properties"


def start(broker: Broker) -> subprocess.Popen[bytes]:
    """Start a broker and wait until it answers.

    Raises:
        BrokerError: Java or Maven is missing, a port is taken, or the broker ended or does not answer.
    """
    if (pid := pid_of(broker.data)) is not None:
        raise BrokerError(f"a broker with this data folder already runs (pid {pid}): {broker.data}")
    java = find_java()
    for port in broker.ports:
        if not is_free(port, broker.host):
            raise BrokerError(f"port {port} is in use: stop what listens there, or choose another with --port")
    fetch_jars()
    broker.data.mkdir(parents=True, exist_ok=True)
    write_properties(broker)
    log = broker.data / "kafka.log"
    with log.open("wb") as output:
        if not (broker.data / "records" / "meta.properties").exists():
            tool = command(java, "kafka.tools.StorageTool", broker.heap)
            storage = [*tool, "format", "-t", CLUSTER, "-c", str(broker.properties)]
            if subprocess.run(storage, stdout=output, stderr=output, check=False).returncode:
                raise BrokerError(f"the data folder cannot be formatted: {tail(log)}")
        ties = tie() if broker.ends_with_starter else []
        process = subprocess.Popen(
            [*ties, *command(java, "kafka.Kafka", broker.heap), str(broker.properties)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    (broker.data / "kafka.pid").write_text(f"{process.pid} {broker.port}\n")
    try:
        _wait(broker, process, log)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def _wait(broker: Broker, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTED_WITHIN_S
    while not answers(broker.port, broker.host):
        if process.poll() is not None:
            raise BrokerError(f"the broker ended with code {process.returncode}: {tail(log)}")
        if time.monotonic() > deadline:
            raise BrokerError(f"the broker did not answer within {STARTED_WITHIN_S:.0f} s: {tail(log)}")
        time.sleep(0.05)


def stop(data: Path = DATA) -> bool:
    """Stop the broker of a data folder and wait for its end.

    Returns:
        Whether there was one.
    """
    pid = pid_of(data)
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOPPED_WITHIN_S
    while pid_of(data) is not None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    (data / "kafka.pid").unlink(missing_ok=True)
    return True


def pid_of(data: Path) -> int | None:
    """Process id of the broker that runs on a data folder, if one does."""
    try:
        pid = int((data / "kafka.pid").read_text().split()[0])
    except (FileNotFoundError, ValueError, IndexError):
        return None
    try:
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return None  # it was a child of ours, and has ended
    except ChildProcessError:
        pass
    command_line = Path(f"/proc/{pid}/cmdline")
    if Path("/proc/self/cmdline").exists():  # numbers are used again: look whose it is
        try:
            mine = str(data.resolve() / "server.properties").encode() in command_line.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            mine = False
        return pid if mine else None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    return pid


def port_of(data: Path) -> int:
    """Port that the broker of a data folder was started with."""
    return int((data / "kafka.pid").read_text().split()[1])


def answers(port: int, host: str = HOST) -> bool:
    """Whether a broker on this port answers `ApiVersions`, the first request of every client."""
    body = struct.pack(">hhih", API_VERSIONS, 0, 1, -1)  # version 0, correlation 1, no client id
    try:
        with socket.create_connection((host, port), ANSWER_WITHIN_S) as connection:
            connection.sendall(struct.pack(">i", len(body)) + body)
            return connection.makefile("rb").read(8)[4:] == struct.pack(">i", 1)
    except OSError:
        return False


def is_free(port: int, host: str = HOST) -> bool:
    """Whether nobody listens on a port, of loopback unless told otherwise."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the broker does; closed ones may linger
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def find_java() -> str:
    """The Java to use: the one of JAVA_HOME, else the one on PATH.

    Raises:
        BrokerError: There is none, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    if java is None:
        raise BrokerError(
            f"no java {f'in JAVA_HOME ({home})' if home else 'on PATH'}: install a JRE, {JAVA_MIN} or newer"
        )
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    match = re.search(r'version "(\d+)(?:\.(\d+))?', said)
    version = int(match[2] if match[1] == "1" and match[2] else match[1]) if match else 0
    if version < JAVA_MIN:
        raise BrokerError(f"Kafka needs Java {JAVA_MIN} or newer, and {java} is {version or 'of an unknown version'}")
    return java


def fetch_jars() -> None:
    """Fetch Kafka's jars with Maven, unless those of this pom.xml are there.

    Raises:
        BrokerError: There is no Maven, or it failed.
    """
    LIB.parent.mkdir(exist_ok=True)
    with (LIB.parent / "lock").open("w") as lock:  # several test runs may start brokers at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        _fetch_missing_jars()


def _fetch_missing_jars() -> None:
    pom = HERE / "pom.xml"
    fetched = LIB / "pom.xml"
    if fetched.exists() and fetched.read_bytes() == pom.read_bytes():
        return
    maven = shutil.which("mvn")
    if maven is None:
        raise BrokerError("no mvn on PATH: install Maven (it fetches Kafka), or use another broker")
    print("kafka: fetching Kafka into .kafka/lib, once (45 MB)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=LIB.parent) as folder:
        # Maven keeps its own copies of the pom's folder out of the tree; what is half fetched never becomes `lib`.
        fresh = Path(folder) / "lib"
        arguments = ["-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={fresh}"]
        done = subprocess.run(
            [maven, *arguments, "-DincludeScope=runtime"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
            raise BrokerError(f"Maven cannot fetch Kafka: {said[0] if said else 'it ended with an error'}")
        shutil.copy(pom, fresh)
        shutil.rmtree(LIB, ignore_errors=True)
        fresh.rename(LIB)


def tie() -> list[str]:
    """What to put before a command, so that its process is killed when this one ends (nothing without `setpriv`)."""
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def command(java: str, main: str, heap: str) -> list[str]:
    """Command that runs a class of Kafka's with a maximum heap size."""
    log4j = f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}"
    return [java, f"-Xmx{heap}", "-XX:+UseSerialGC", log4j, "-cp", f"{LIB}/*", main]


def write_properties(broker: Broker) -> None:
    """Write the settings of one broker: the common ones and where it lives."""
    port, host = broker.port, broker.host
    listeners = [f"PLAINTEXT://{host}:{port}"] + ([f"SASL_PLAINTEXT://{host}:{port + 2}"] if broker.sasl else [])
    is_controller = broker.controller is None
    own = [f"CONTROLLER://{HOST}:{port + 1}"] if is_controller else []
    lines = [  # of two lines for one setting, the last one counts
        (HERE / "server.properties").read_text(),
        f"node.id={broker.node}",
        *([] if is_controller else ["process.roles=broker"]),
        f"listeners={','.join([*listeners, *own])}",
        f"advertised.listeners={','.join(listeners)}",
        f"controller.quorum.voters=1@{HOST}:{broker.controller or port + 1}",
        f"log.dirs={broker.data.resolve() / 'records'}",
        *broker.settings,
    ]
    if broker.sasl:
        user, password = broker.sasl
        module = "org.apache.kafka.common.security.plain.PlainLoginModule"
        jaas = "listener.name.sasl_plaintext.plain.sasl.jaas.config"
        lines.append(f'{jaas}={module} required user_{user}="{password}";')
    broker.properties.write_text("\n".join(lines) + "\n")


def tail(log: Path) -> str:
    """Last lines of a broker's log."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return f"{log} ends with\n  " + "\n  ".join(lines) if lines else f"{log} is empty"


def login(text: str) -> tuple[str, str]:
    """User and password of `USER:PASSWORD`."""
    user, colon, password = text.partition(":")
    if not (colon and re.fullmatch(r"\w+", user) and re.fullmatch(r"[\w.-]+", password)):
        raise argparse.ArgumentTypeError("give USER:PASSWORD of letters and digits")
    return user, password


def main() -> int:
    """Do what the command line says.

    Returns:
        Exit code: 0, or 1 with a message.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("action", choices=["start", "stop", "status"])
    parser.add_argument("--port", type=int, default=PORT, help="first of up to three ports in a row (%(default)s)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the broker (.kafka/data)")
    parser.add_argument("--sasl", type=login, metavar="USER:PASSWORD", help="listen for SASL/PLAIN on the third port")
    options = parser.parse_args()
    pid = pid_of(options.data)
    if options.action == "stop":
        print("kafka: stopped" if stop(options.data) else "kafka: was not running")
    elif options.action == "status" or pid is not None:
        print(f"kafka: {HOST}:{port_of(options.data)} (pid {pid})" if pid is not None else "kafka: not running")
        return 0 if pid is not None else 1
    else:
        broker = Broker(options.port, options.data, options.sasl)
        try:
            process = start(broker)
        except BrokerError as error:
            print(f"kafka: {error}", file=sys.stderr)
            return 1
        how = "make kafka-stop" if options.data == DATA else f"python infra/kafka/kafka.py stop --data {options.data}"
        print(f"kafka: {broker.address} (pid {process.pid}); stop it with `{how}`")
        if broker.sasl:
            print(f"kafka: {broker.sasl_address} for SASL/PLAIN clients")
    return 0


if __name__ == "__main__":
    sys.exit(main())
