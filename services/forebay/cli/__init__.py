"""All of forebay from a shell. Errors are one line that says what to do, with exit code 2."""
