"""A fleet of virtual devices on Ray: all that agents and coordinator compute, without broker and boards.

A round is planned, admitted, charged, trained, cut into fragments, checked, added up and stepped by the
functions that agents and coordinator run; docs/simulation.md says what is missing. ``dpagent simulate`` is a
thin caller of :class:`~simulation.virtual.fleet.VirtualFleet`.
"""
