"""A whole fleet on one machine: broker, coordinator and agents as processes of their own.

The programs, messages and databases are those of a real deployment; each agent has a directory of its own.
``dpagent demo`` is a thin caller of :class:`~simulation.fleet.Fleet`.

>>> import pathlib, tempfile
>>> from simulation import Fleet, Request
>>> fleet = Fleet(Request(devices=3, rounds=10, epsilon=2), pathlib.Path(tempfile.mkdtemp()))
>>> fleet.spec.name, fleet.settings.records_per_device, fleet.outlook.verdict
('digits', 479, 'good')

``fleet.run()`` trains, and returns a :class:`~simulation.record.RunRecord`.
"""

from importlib import import_module
from typing import Any

# Loaded on demand: the programs that a fleet starts need neither, and start sooner without.
_FRONT = {"Fleet": "simulation.fleet", "Request": "simulation.request"}


def __getattr__(name: str) -> Any:
    if name not in _FRONT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FRONT[name]), name)
