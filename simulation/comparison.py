"""Several methods, each with a fleet of its own on the same records, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpagent.errors import ConfigurationError, UsageError
from dpagent.privacy.methods import METHODS
from dpagent.privacy.statement import Adjacency, BudgetStatement, Trust, Unit
from dpagent.wording import named
from simulation.presets import preset_of
from simulation.record import RunRecord
from simulation.request import Request
from simulation.settings import SETTINGS_FILE

Scope = tuple[Unit, Trust]
"""The unit that a bound is for, and who has to be trusted for it."""


def requests_by_method(request: Request, methods: Sequence[str], state_dir: Path) -> dict[str, Request]:
    """A request for each method, all with as many devices, so that each holds the same records.

    Args:
        request: for all of them.
        methods: at least two different ones.
        state_dir: of the comparison; each run has a directory in it.

    Raises:
        UsageError: There are too few methods, or one is unknown or twice.
        ConfigurationError: The directory holds a single run.
    """
    unknown = [method for method in methods if method not in METHODS]
    if unknown or len(set(methods)) < max(2, len(methods)):
        raise UsageError(
            f"{named('compare')}: got {','.join(methods)!r}; expected two or more different ones of "
            f"{', '.join(METHODS)}, with commas between them."
        )
    if (state_dir / SETTINGS_FILE).exists():
        raise ConfigurationError(
            f"{state_dir} holds the run of one method. Give another {named('state_dir')}, or leave out "
            f"{named('compare')}."
        )
    requests = {method: request.with_values({"method": method}) for method in methods}
    devices = max(each.devices or preset_of(each).devices for each in requests.values())
    return {method: each.with_values({"devices": devices}) for method, each in requests.items()}


def bounds_of(record: RunRecord, scopes: Sequence[Scope]) -> list[float | None]:
    """ε of a run in each scope; None where it gives no bound there.

    A bound for any change of a whole device holds for each of its records, and one that trusts nobody holds
    whomever one trusts. The reverse of either is no bound. A bound for a device against zeros is none for one
    of its records: to change that, the device sends zeros and then its update again, which costs twice.
    """
    return [
        min((each.epsilon for each in record.columns if _holds(each, *scope)), default=None)
        for scope in scopes
    ]


def _holds(statement: BudgetStatement, unit: Unit, trust: Trust) -> bool:
    """Whether a statement bounds what a scope asks for."""
    hides_any_change = statement.unit is Unit.DEVICE and statement.adjacency is Adjacency.REPLACE_ONE
    is_bound = statement.unit is unit or (unit is Unit.RECORD and hides_any_change)
    return is_bound and statement.trust in (Trust.NONE, trust)


def scopes_of(records: Sequence[RunRecord]) -> list[Scope]:
    """The scopes of devices and records in which some run gives a bound of its own."""
    scopes = {(column.unit, column.trust) for each in records for column in each.columns}
    units, trusts = [Unit.RECORD, Unit.DEVICE], [Trust.COORDINATOR, Trust.SHUFFLER, Trust.NONE]
    found = [scope for scope in scopes if scope[0] in units]
    return sorted(found, key=lambda scope: (units.index(scope[0]), trusts.index(scope[1])))


def scope_in_words(scope: Scope) -> str:
    """For a table."""
    unit, trust = scope
    believed = {
        Trust.NONE: "nobody trusted",
        Trust.SHUFFLER: "if nobody links fragments",
        Trust.COORDINATOR: "trusting the coordinator",
    }[trust]
    return f"ε of a {unit}, {believed}"
