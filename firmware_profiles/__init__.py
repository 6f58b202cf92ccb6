"""One YAML profile a board; see :mod:`agent.profile`."""
