"""What makes a release private, and what it costs.

A device samples a lot (:mod:`~dpagent.privacy.sampling`), constrains each record's gradient to
integers of bounded norm and adds exact integer noise (:mod:`~dpagent.privacy.mechanism`,
:mod:`~dpagent.privacy.discrete_gaussian`), and rounds the result for the wire
(:mod:`~dpagent.privacy.wire`). The cost is accounted for in :mod:`~dpagent.privacy.accounting`,
planned ahead in :mod:`~dpagent.privacy.calibration` on one of the
:mod:`~dpagent.privacy.schedules`. :mod:`~dpagent.privacy.caps` is free post-processing.
Needs numpy and nothing else. The guarantee is stated in ``docs/privacy.md``.
"""

from dpagent.privacy.accounting import (
    INTEGER_ORDERS,
    ORDERS,
    RdpAccountant,
    epsilon_from_rdp,
    running_epsilon,
    subsampled_gaussian_rdp,
)
from dpagent.privacy.calibration import BudgetPlan, calibrate
from dpagent.privacy.caps import CapReport, ClampCap
from dpagent.privacy.discrete_gaussian import DiscreteGaussianSampler
from dpagent.privacy.events import ApproximateEvent, PrivacyLossEvent
from dpagent.privacy.mechanism import FINE_STEPS, Constrained, DiscretisedGaussian
from dpagent.privacy.sampling import poisson_lot
from dpagent.privacy.schedules import Schedule
from dpagent.privacy.statement import Adjacency, BudgetStatement, Trust, Unit
from dpagent.privacy.wire import coarsen, wire_shift, wire_width

__all__ = [
    "FINE_STEPS",
    "INTEGER_ORDERS",
    "ORDERS",
    "Adjacency",
    "ApproximateEvent",
    "BudgetPlan",
    "BudgetStatement",
    "CapReport",
    "ClampCap",
    "Constrained",
    "DiscreteGaussianSampler",
    "DiscretisedGaussian",
    "PrivacyLossEvent",
    "RdpAccountant",
    "Schedule",
    "Trust",
    "Unit",
    "calibrate",
    "coarsen",
    "epsilon_from_rdp",
    "poisson_lot",
    "running_epsilon",
    "subsampled_gaussian_rdp",
    "wire_shift",
    "wire_width",
]
