"""`python -m gyre_sdk.cli`: the same as `gyre`."""

from gyre_sdk.cli import main

main()
