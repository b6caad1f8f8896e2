"""Deterministic model of an LLM engine in virtual time. The mock worker and the simulator use it."""
