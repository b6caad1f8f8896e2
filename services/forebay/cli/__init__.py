"""The command line of forebay. A user error is reported as one line that says what to do, with exit code 2."""
