"""HTML report of a simulation."""
