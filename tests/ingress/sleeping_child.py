"""A child process that never answers."""

import signal

if __name__ == "__main__":
    signal.pause()
