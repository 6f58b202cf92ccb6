"""Programs of the tests start as forks of a process that has imported them, in milliseconds.

:mod:`launching.server` is that process; :mod:`launching.starts` asks it.
"""
