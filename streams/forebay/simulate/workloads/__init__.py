"""Readers of workload formats, workload generators, and the transformations applied before a workload is played."""
