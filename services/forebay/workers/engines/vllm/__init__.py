"""vLLM as an engine: its own process, requests, KV events, transfers and media."""
