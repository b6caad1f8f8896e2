"""Engine profiles: step times and sizes of an engine, read from files, derived from data sheets, or fitted."""
