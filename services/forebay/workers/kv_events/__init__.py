"""Decode the KV events of real engines into cache changes, with hashes that all engines share (sequence hashes)."""
