"""Shadows, which evaluate another policy or configuration on a live log without affecting its decisions."""
