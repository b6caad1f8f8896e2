"""KV events of real engines: what they say on their own wires, as cache changes in canonical hashes."""
