"""The ``dpagent simulate`` command."""
