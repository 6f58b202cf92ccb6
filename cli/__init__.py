"""The `dpagent` command: thin Typer commands, one file or folder per noun."""
