"""KV connector of vLLM that offloads blocks to the tiers of a worker and loads them from there."""
