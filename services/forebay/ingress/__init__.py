"""OpenAI-compatible HTTP in, tokens out: validates, tokenises, submits to the log, and streams what comes back."""
