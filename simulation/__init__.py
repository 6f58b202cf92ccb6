"""A whole fleet on one machine: broker, coordinator and agents as processes of their own.

The programs, messages and databases are those of a real deployment; each agent has a directory of its own.
``dpagent demo`` is a thin caller of :class:`~simulation.fleet.Fleet`.

>>> from simulation import Fleet, Request
>>> import tempfile, pathlib
>>> fleet = Fleet(Request(devices=3, rounds=10, epsilon=2), pathlib.Path(tempfile.mkdtemp()))
>>> fleet.spec.name, fleet.settings.records_per_device, fleet.outlook.verdict
('digits', 479, 'good')

``fleet.run()`` trains, and returns a :class:`~simulation.record.RunRecord`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.fleet import Fleet, Listener
    from simulation.request import BrokerRequest, DataSelection, Request

__all__ = ["BrokerRequest", "DataSelection", "Fleet", "Listener", "Request"]


def __getattr__(name: str) -> Any:
    # On demand: the small programs of this package need none of it, and start sooner without.
    if name in ("Fleet", "Listener"):
        from simulation import fleet

        return getattr(fleet, name)
    if name in __all__:
        from simulation import request

        return getattr(request, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
