"""Events of forebay: every fact, command and decision, and its encoding on the wire."""
