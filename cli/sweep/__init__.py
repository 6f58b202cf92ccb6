"""The ``dpagent sweep`` commands."""
