"""The processes of forebay: for each kind a class of settings, and a coroutine `run` that runs it until a signal."""
