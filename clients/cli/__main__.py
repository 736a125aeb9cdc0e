"""`python -m clients.cli`: the same as `unreal-agent`."""

from clients.cli.main import main

main()
