"""The formats that records may be stored in, a file or folder each.

A format is a :class:`~dpagent.learning.data.format.Format`: its name, how it is recognised, its settings, how
it is opened, and how inputs without labels are read. A new one is a new file here and its name in
:mod:`dpagent.learning.data.registry`; everything else asks the registry.
"""
