"""`python -m forebay.cli`: the command line where its script is not on the path."""

from forebay.cli.app import main

main()
