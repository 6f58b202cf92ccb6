"""The `dpagent` command: thin Typer commands, one file a noun."""
