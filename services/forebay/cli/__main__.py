"""`python -m forebay.cli`: the command line, if the script `forebay` is not on the path."""

from forebay.cli.app import main

main()
