"""Commands about simulation in virtual time: simulate, sweep, workload, fit and profile."""
