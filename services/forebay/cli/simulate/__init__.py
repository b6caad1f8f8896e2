"""Commands for workloads in virtual time: simulate, sweep, workload, fit and profile."""
