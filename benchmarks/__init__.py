"""Every figure that the project states about itself, and the commands that measure them.

``python -m benchmarks`` (``make bench``) runs them all, or those named, and writes
``benchmarks/figures.json`` and from it ``docs/benchmarks.md``. One module measures one thing: its
docstring says how and within which limits, and its ``run()`` returns the figures.
"""
