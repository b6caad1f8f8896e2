"""The OpenAI-compatible HTTP API: server, routes, limits, admin API and responses."""
