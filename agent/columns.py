"""The columns of a ledger: what its figures hold for, and whom they trust.

Figures that trust different parties are never added up. So the jobs on a data set that trust nobody are one
account of the ledger, under the data set's name, and those that trust the coordinator are another, under
``NAME@coordinator``: with a lifetime budget, charges, a reservation and write-offs of its own. No data set's
name contains an ``@``.

A figure of the second account bounds what anybody but the coordinator learns of the device by those jobs.
Without that trust they have no bound, so the first account says nothing of them: unless the device adds noise
of its own. Then a job has a figure of each kind, and a charge for each round in both accounts.
"""

from __future__ import annotations

from typing import Final, Protocol, TypeAlias

from dpagent.errors import ParameterError
from dpagent.privacy.statement import Adjacency, Trust, Unit

MARK: Final = "@"
"""Between a data set's name and the trusted party."""

Scope: TypeAlias = tuple[Unit, Adjacency, Trust]

SCOPES: Final[dict[Trust, Scope]] = {
    Trust.NONE: (Unit.RECORD, Adjacency.ADD_OR_REMOVE_ONE, Trust.NONE),
    Trust.COORDINATOR: (Unit.DEVICE, Adjacency.ZERO_OUT, Trust.COORDINATOR),
}
"""Of every figure in an account, by the party that it trusts."""

_IMPLIES: Final[dict[Scope, Scope]] = {
    (Unit.DEVICE, Adjacency.REPLACE_ONE, Trust.NONE): SCOPES[Trust.NONE],
}
"""A guarantee for a whole device with any other records bounds the presence of one record too: adding or
removing it is one way to have other records."""


class _Guaranteed(Protocol):
    """A mechanism, as far as an account has to know it; see
    :class:`~dpagent.privacy.mechanisms.mechanism.Mechanism`."""

    @property
    def name(self) -> str: ...
    @property
    def unit(self) -> Unit: ...
    @property
    def adjacency(self) -> Adjacency: ...
    @property
    def trust(self) -> Trust: ...


def account_name(dataset: str, trust: Trust) -> str:
    """The ledger's name for the jobs on a data set that trust that party.

    >>> account_name("digits", Trust.NONE), account_name("digits", Trust.COORDINATOR)
    ('digits', 'digits@coordinator')
    """
    return dataset if trust is Trust.NONE else f"{dataset}{MARK}{trust}"


def dataset_of(account: str) -> str:
    """The data set of an account.

    >>> dataset_of("digits@coordinator")
    'digits'
    """
    return account.partition(MARK)[0]


def scope_of(account: str) -> Scope:
    """What the figures of an account hold for.

    Raises:
        ParameterError: no account has such a name.
    """
    _, marked, trust = account.partition(MARK)
    for known, scope in SCOPES.items():
        if trust == ("" if known is Trust.NONE else known) and bool(marked) == (known is not Trust.NONE):
            return scope
    raise ParameterError(f"account is {account!r}; expected a data set's name, or that and @coordinator.")


def require_scope(mechanism: _Guaranteed, account: str) -> None:
    """Check that a mechanism's guarantee is one that an account adds up, or implies it.

    Raises:
        ParameterError: it is not.
    """
    scope = (mechanism.unit, mechanism.adjacency, mechanism.trust)
    accepted = scope_of(account)
    if _IMPLIES.get(scope, scope) != accepted:
        guarantees = (
            f"the {adjacency.meaning} of {unit.meaning} (trusted: {trust})"
            for unit, adjacency, trust in (scope, accepted)
        )
        raise ParameterError(
            f"mechanism {mechanism.name} hides {next(guarantees)}; the ledger's account {account!r} adds up "
            f"only figures for {next(guarantees)}."
        )
