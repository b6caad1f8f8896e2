"""Commands that run services: all of them in one process (`forebay up`), or one service per process."""
