"""Formats of workloads and generators of them, and what is made of either before it is played."""
