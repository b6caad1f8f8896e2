"""Simulation: run the routing core on recorded or synthetic workloads in virtual time, under any policy."""
