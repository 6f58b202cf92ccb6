"""The cost of the two-point mechanism: three figures with three different meanings.

Sun, Qian, Chen (LDP-FL, IJCAI 2021) report ε of one weight and claim that anonymity keeps it from adding
up over weights and rounds. That holds only against an observer who cannot link fragments. So there is

- ε of one coordinate, which says nothing about a device;
- k·ε a round for a device that trusts no party, rounds added up: the k bits are independent given the
  device's weights and positions, positions do not depend on weights, δ is 0;
- a central (ε, δ) for a device under the shuffler's anonymity, by
  :mod:`dpagent.privacy.accounting.shuffling`.

The adjacency of all three is replace-one: in the other world the device has any other weights. The
statements differ in scope, so these figures must not be added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from dpagent.errors import ParameterError, require_between, require_count
from dpagent.privacy.accounting.composition import exact_sum
from dpagent.privacy.accounting.shuffling import (
    LOCAL_EPSILON_RANGE,
    Bound,
    ShuffledBatch,
    central_epsilon,
    least_reports,
)
from dpagent.privacy.mechanisms.two_point import TwoPoint
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRound
from dpagent.privacy.statement import Adjacency, BudgetStatement, Trust, Unit

_NAME: Final = "LDP-FL two-point"


def bit_statement(epsilon: float) -> BudgetStatement:
    """The figure for one coordinate that is sent once, as a bit of so much ε."""
    return BudgetStatement(
        Unit.COORDINATE,
        Adjacency.REPLACE_ONE,
        Trust.NONE,
        _NAME,
        epsilon,
        0.0,
        ("It says nothing about a device, which sends many coordinates.",),
    )


def device_statement(mechanism: TwoPoint, rounds: int = 1) -> BudgetStatement:
    """The figure for all that a device sends in ``rounds`` rounds, with no trusted party; kinds of rounds add
    up.

    Raises:
        ParameterError: ``rounds`` is below 1.
    """
    require_count("rounds", rounds)
    epsilon = exact_sum([(mechanism.epsilon, mechanism.coordinates * rounds)])
    return BudgetStatement(Unit.DEVICE, Adjacency.REPLACE_ONE, Trust.NONE, _NAME, epsilon, 0.0)


def shuffled_statement(
    rounds: Sequence[tuple[TwoPoint, int, int]],
    delta: float,
    *,
    positions_known: bool = False,
    failure_share: float = 0.1,
) -> BudgetStatement:
    """The central figure for a device's whole contribution, under the shuffler's anonymity.

    With positions secret, a block is a batch of n reports of one ε-LDP randomiser, "draw a position of the
    block, then its bit", with the same ranges on all devices: the clones bound at n. Where every block is
    a single position, or where ``positions_known``, a batch is the reports for one position, of which the
    two-point bounds hold; with sampling their number is random, and bounded from below by
    :func:`~dpagent.privacy.accounting.shuffling.least_reports` at a share of δ.

    Args:
        rounds: for each kind of round its mechanism, the least number of honest devices whose reports
            arrive in it (the device included), and how many such rounds there are.
        delta: total δ, in (0, 1).
        positions_known: whether to assume that an observer learns which positions each device
            reported on (though not which bit).
        failure_share: share of δ set aside for positions with too few reports, in (0, 1).

    Raises:
        ParameterError: a value is out of its range.
    """
    require_between("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    require_between("failure share", failure_share, 0.0, 1.0, low_open=True, high_open=True)
    if not rounds:
        raise ParameterError("rounds is empty; expected at least one round.")
    for _, devices, count in rounds:
        require_count("honest devices", devices)
        require_count("rounds", count)
    sampled = sum(m.coordinates * count for m, _, count in rounds if m.coordinates < m.dimension)
    failure = failure_share * delta if sampled and positions_known else 0.0
    batches = []
    for mechanism, devices, count in rounds:
        pieces = mechanism.coordinates * count
        if mechanism.coordinates == mechanism.dimension:
            batch = ShuffledBatch.at_position(devices, mechanism.epsilon)
        elif not positions_known:
            batch = ShuffledBatch(devices, mechanism.epsilon, Bound.CLONES)
        else:
            # ⌊u·size/2⁶⁴⌋ falls short of 1/size by less than 2⁻⁶⁴, and size is at most 2²⁸
            probability = (1 - 2.0**-36) / float(np.diff(mechanism.block_edges()).max())
            least = least_reports(devices, probability, sampled, failure)
            batch = ShuffledBatch.at_position(least, mechanism.epsilon)
        batches.append((batch, pieces))
    return BudgetStatement(
        Unit.DEVICE,
        Adjacency.REPLACE_ONE,
        Trust.SHUFFLER,
        _NAME,
        central_epsilon(batches, delta - failure),
        delta,
        _assumptions(min(devices for _, devices, _ in rounds), positions_known),
    )


def fragments_statement(
    rounds: Sequence[TwoPointRound], *, block: int, devices: int, local_epsilon: float, delta: float
) -> BudgetStatement:
    """The central figure as a fleet runs it, where a fragment holds several reports of one device.

    Reports of one fragment are linked, so the randomiser that hides among others is the fragment, of
    ``block`` bits: it is (block · ε₀)-LDP, and the same on all devices, since they draw positions alike from
    the same groups, with the same ranges. Fragments of different positions, and of different rounds, are
    different batches. So the clones bound holds for each, and they compose. Where it is no better than what
    holds without the shuffler, or is not defined, that is the figure.

    Args:
        rounds: those that are over.
        block: reports in a fragment.
        devices: the least number of honest devices whose fragments arrive in each round, this one included.
        local_epsilon: what the same rounds cost at ``delta`` with no trusted party.
        delta: in (0, 1).

    Raises:
        ParameterError: a value is out of its range.
    """
    require_count("honest devices", devices)
    require_count("block", block)
    pieces: Counter[float] = Counter()
    for each in rounds:
        bits = min(block, each.coordinates)
        pieces[exact_sum([(each.bit_epsilon, bits)])] += -(-each.coordinates // block)
    epsilon = local_epsilon
    if devices > 1 and all(LOCAL_EPSILON_RANGE[0] <= piece <= LOCAL_EPSILON_RANGE[1] for piece in pieces):
        batches = [(ShuffledBatch(devices, piece, Bound.CLONES), count) for piece, count in pieces.items()]
        epsilon = min(local_epsilon, central_epsilon(batches, delta)) if batches else 0.0
    return BudgetStatement(
        Unit.DEVICE, Adjacency.REPLACE_ONE, Trust.SHUFFLER, _NAME, epsilon, delta,
        _assumptions(devices, positions_known=False),
    )  # fmt: skip


def _assumptions(devices: int, positions_known: bool) -> tuple[str, ...]:
    return (
        f"In every round, reports of at least {devices} devices that keep to the protocol arrive, and "
        "whether one arrives does not depend on its content.",
        "Nobody links a report with its sender.",
        "An observer may know which positions a device reported on, but not with which bits."
        if positions_known
        else "Nobody links two reports of one device, or learns which positions a device reported on.",
    )
