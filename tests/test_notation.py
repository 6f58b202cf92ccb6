"""Figures that stand side by side: what is spent, and what may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.overview import Account
from cli.status import _account
from dpagent.notation import plain_bound, upwards

_LIMITS = st.floats(1e-6, 1_000.0)
_SHARES = st.floats(0.0, 1.0)


@given(_LIMITS, _SHARES)
def test_what_is_within_a_limit_is_shown_so_and_as_no_less_than_it_is(limit: float, share: float) -> None:
    """Before, ε = 1.23442 of 1.23445 was '1.235 of 1.23445'."""
    spent = limit * share
    shown, most = float(upwards(spent, of=limit)), float(plain_bound(limit))
    assert spent * (1 - 1e-11) <= shown <= most * (1 + 1e-11)


@given(_LIMITS, st.floats(1.001, 10.0))
def test_what_is_beyond_a_limit_is_shown_so(limit: float, factor: float) -> None:
    assert float(upwards(limit * factor, of=limit)) > float(plain_bound(limit))


def test_the_status_of_a_board_does_not_read_as_if_its_budget_were_overspent() -> None:
    account = Account("mine", 1.23442, 1.234449, 1.23445, 1e-6, 1e-5)
    assert _account(account).startswith("mine: ε = 1.23442 spent and 1.23445 reserved of 1.23445; ")
