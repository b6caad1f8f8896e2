"""One object per engine instance: takes work from the log, runs it, and writes what came of it."""
