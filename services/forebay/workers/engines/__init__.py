"""Engine adapters, one package per engine, and their common parts."""
