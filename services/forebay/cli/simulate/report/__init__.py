"""What came of a simulation, as one page to look at."""
