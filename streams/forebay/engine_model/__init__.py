"""Deterministic model of an LLM engine in virtual time, used by the mock worker and the simulator."""
