"""How long an engine's steps take and how large it is: read from files, derived from data sheets, or fitted."""
