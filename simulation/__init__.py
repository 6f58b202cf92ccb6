"""A whole fleet on one machine: broker, coordinator and agents as processes of their own.

The programs, messages and databases are those of a real deployment; each agent has a directory of its own.
``dpagent demo`` is a thin caller of :class:`~simulation.fleet.Fleet`.

>>> import pathlib, tempfile
>>> from simulation.fleet import Fleet
>>> from simulation.request import Request
>>> fleet = Fleet(Request(devices=3, rounds=10, epsilon=2), pathlib.Path(tempfile.mkdtemp()))
>>> fleet.spec.name, fleet.settings.records_per_device, fleet.outlook.verdict
('digits', 479, 'good')

``fleet.run()`` trains, and returns a :class:`~simulation.record.RunRecord`.
"""
