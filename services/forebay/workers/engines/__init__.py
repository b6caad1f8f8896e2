"""Engine adapters, one package per engine, and what they share."""
