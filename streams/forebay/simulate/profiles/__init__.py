"""Engine profiles: step times and sizes of an engine, from a file, from data sheets, or fitted to measurements."""
