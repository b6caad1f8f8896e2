"""Adapter of the engine vLLM: its processes, requests, KV events, KV transfers and media."""
