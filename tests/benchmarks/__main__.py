"""`python -m tests.benchmarks NAME [options]`: run a benchmark and print its measurements."""

import importlib
import sys

NAMES = (
    "index",
    "indexer",
    "decision",
    "snapshot",
    "http",
    "owner",
    "kafka",
    "replicas",
    "capacity",
    "gateway",
    "replay",
    "simulate",
    "simulate-table",
    "cache-pressure",
    "disagg",
    "kv-transfer",
    "vllm-tiers",
    "adapters",
    "overload",
    "planner",
)
BENCHMARKS = {name: f"tests.benchmarks.bench_{name.replace('-', '_')}" for name in NAMES}


def main() -> None:
    """Run the benchmark named by the first argument."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        raise SystemExit(f"name a benchmark: {', '.join(BENCHMARKS)}; NAME --help lists its options")
    del sys.argv[1]
    importlib.import_module(BENCHMARKS[name]).main()


if __name__ == "__main__":
    main()
