"""`python -m charonia`."""

from charonia.cli import main

main()
