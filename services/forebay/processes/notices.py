"""Lines that a process shows its user: what it serves, what it waits for, and why it ends.

They are records of one logger, so a program that runs a process gets them like its other records. The command line
prints them.
"""

import logging

logger = logging.getLogger("forebay.processes.notices")


def announce(text: str) -> None:
    logger.info("%s", text)


def complain(text: str) -> None:
    logger.error("%s", text)
