"""Analyses that need both the replay of a recording and the simulator."""
