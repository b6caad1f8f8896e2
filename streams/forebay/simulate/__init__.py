"""The core on an invented log: recorded or made-up workloads in virtual time, under any policy."""
