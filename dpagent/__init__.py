"""dpagent: privacy-preserving federated learning for fleets of small boards.

The library: importable, typed, with no daemon in it. ``dpagent.privacy`` and
``dpagent.learning`` compute, ``dpagent.protocol`` defines the messages,
``dpagent.transport`` carries them. The programs are the top-level packages
``agent``, ``coordinator`` and ``cli``.
"""

__version__ = "0.1.0"
