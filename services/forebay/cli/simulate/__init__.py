"""Workloads in virtual time: simulated, swept, described, and held against what was lived."""
