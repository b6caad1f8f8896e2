"""KV events of real engines, decoded from their wire formats into cache changes with canonical hashes."""
