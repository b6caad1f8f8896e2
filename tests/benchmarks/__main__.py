"""`python -m tests.benchmarks NAME [options]`: measures and prints; nothing is asserted."""

import importlib
import sys

NAMES = (
    "index",
    "decision",
    "snapshot",
    "http",
    "owner",
    "kafka",
    "kafka-api",
    "shadow",
    "replay",
    "simulate",
    "simulate-table",
    "disagg",
    "kv-transfer",
    "kv-hosts",
    "overload",
)
BENCHMARKS = {name: f"tests.benchmarks.bench_{name.replace('-', '_')}" for name in NAMES}


def main() -> None:
    """Run the benchmark that is named first."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        raise SystemExit(f"which one? {', '.join(BENCHMARKS)}; then --help tells its options")
    del sys.argv[1]
    importlib.import_module(BENCHMARKS[name]).main()


if __name__ == "__main__":
    main()
