"""A deterministic model of an LLM engine in virtual time. The mock worker and the simulator run it."""
