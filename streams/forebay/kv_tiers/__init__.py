"""Decisions about KV blocks in host memory, on disk and in a shared store. The caller moves the bytes."""
