"""What makes a release private, and what it costs.

A device samples a lot (:mod:`~dpagent.privacy.sampling`), constrains each record's gradient to
integers of bounded norm (:mod:`~dpagent.privacy.grid`), adds exact integer noise by one of the
mechanisms, and rounds the result for the wire (:mod:`~dpagent.privacy.wire`). The cost is accounted
for by :mod:`~dpagent.privacy.pld` (tight) or :mod:`~dpagent.privacy.accounting` (Rényi), planned
ahead in :mod:`~dpagent.privacy.calibration` on one of the :mod:`~dpagent.privacy.schedules`, held in
by :mod:`~dpagent.privacy.filters` where charges are chosen as one goes, and told in one form,
:mod:`~dpagent.privacy.statement`. Needs numpy and nothing else. ``docs/privacy.md`` says which module
and which test stands for each guarantee.

A name is loaded from its module when it is first used, so that a board carries what it runs and no more.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dpagent.privacy.accounting import (
        INTEGER_ORDERS,
        ORDERS,
        RdpAccountant,
        epsilon_from_rdp,
        running_epsilon,
        subsampled_gaussian_rdp,
    )
    from dpagent.privacy.approximate import amplified_epsilon, imperfect_delta, unamplified_epsilon
    from dpagent.privacy.bounded import BoundedBudget, BoundedCap, BoundedRound
    from dpagent.privacy.calibration import BudgetPlan, accountant_for, affordable_rounds, calibrate, price
    from dpagent.privacy.caps import CapReport, ClampCap
    from dpagent.privacy.central import CentralGaussian, CentralLaplace
    from dpagent.privacy.clipping import COUNT_WEIGHT, Clipping, adapted_norm
    from dpagent.privacy.composition import (
        composed,
        composed_rho,
        gaussian_rho,
        group_event,
        group_rho,
        pure_rho,
        zcdp_delta,
        zcdp_epsilon,
        zcdp_rho,
    )
    from dpagent.privacy.discrete_gaussian import DiscreteGaussianSampler
    from dpagent.privacy.discrete_laplace import DiscreteLaplaceSampler, usable_bound
    from dpagent.privacy.entropy import NoisePool
    from dpagent.privacy.events import ApproximateEvent, PrivacyLossEvent
    from dpagent.privacy.filters import BudgetExceededError, RenyiFilter, ZcdpFilter, best_order
    from dpagent.privacy.gaussian import (
        NOISE_SHARE,
        DiscretisedGaussian,
        fine_steps_for,
        require_noise_as_priced,
    )
    from dpagent.privacy.grid import FINE_STEPS, Constrained, Grid, Norm, l1_fine_steps
    from dpagent.privacy.laplace import DiscretisedLaplace
    from dpagent.privacy.layer_ranges import LayerRange, adapted_ranges
    from dpagent.privacy.mechanism import Mechanism
    from dpagent.privacy.pld import PldAccountant, loss_grid, running_pld_epsilon
    from dpagent.privacy.published import PublishedCap
    from dpagent.privacy.release_loss import MIN_SIGMA_STEPS
    from dpagent.privacy.sampling import poisson_lot, shuffled
    from dpagent.privacy.schedules import Schedule
    from dpagent.privacy.shuffling import Bound, ShuffledBatch, central_delta, central_epsilon, least_reports
    from dpagent.privacy.statement import Adjacency, BudgetStatement, Trust, Unit
    from dpagent.privacy.truncated_laplace import TruncatedLaplace
    from dpagent.privacy.two_point import TwoPoint
    from dpagent.privacy.two_point_budget import coordinate_statement, device_statement, shuffled_statement
    from dpagent.privacy.wire import coarsen, wire_shift, wire_width

__all__ = [
    "COUNT_WEIGHT",
    "FINE_STEPS",
    "INTEGER_ORDERS",
    "MIN_SIGMA_STEPS",
    "NOISE_SHARE",
    "ORDERS",
    "Adjacency",
    "ApproximateEvent",
    "Bound",
    "BoundedBudget",
    "BoundedCap",
    "BoundedRound",
    "BudgetExceededError",
    "BudgetPlan",
    "BudgetStatement",
    "CapReport",
    "CentralGaussian",
    "CentralLaplace",
    "ClampCap",
    "Clipping",
    "Constrained",
    "DiscreteGaussianSampler",
    "DiscreteLaplaceSampler",
    "DiscretisedGaussian",
    "DiscretisedLaplace",
    "Grid",
    "LayerRange",
    "Mechanism",
    "NoisePool",
    "Norm",
    "PldAccountant",
    "PrivacyLossEvent",
    "PublishedCap",
    "RdpAccountant",
    "RenyiFilter",
    "Schedule",
    "ShuffledBatch",
    "TruncatedLaplace",
    "Trust",
    "TwoPoint",
    "Unit",
    "ZcdpFilter",
    "accountant_for",
    "adapted_norm",
    "adapted_ranges",
    "affordable_rounds",
    "amplified_epsilon",
    "best_order",
    "calibrate",
    "central_delta",
    "central_epsilon",
    "coarsen",
    "composed",
    "composed_rho",
    "coordinate_statement",
    "device_statement",
    "epsilon_from_rdp",
    "fine_steps_for",
    "gaussian_rho",
    "group_event",
    "group_rho",
    "imperfect_delta",
    "l1_fine_steps",
    "least_reports",
    "loss_grid",
    "poisson_lot",
    "price",
    "pure_rho",
    "require_noise_as_priced",
    "running_epsilon",
    "running_pld_epsilon",
    "shuffled",
    "shuffled_statement",
    "subsampled_gaussian_rdp",
    "unamplified_epsilon",
    "usable_bound",
    "wire_shift",
    "wire_width",
    "zcdp_delta",
    "zcdp_epsilon",
    "zcdp_rho",
]

_HOMES: Final = {
    "accounting": (
        "INTEGER_ORDERS",
        "ORDERS",
        "RdpAccountant",
        "epsilon_from_rdp",
        "running_epsilon",
        "subsampled_gaussian_rdp",
    ),
    "approximate": ("amplified_epsilon", "imperfect_delta", "unamplified_epsilon"),
    "bounded": ("BoundedBudget", "BoundedCap", "BoundedRound"),
    "calibration": ("BudgetPlan", "accountant_for", "affordable_rounds", "calibrate", "price"),
    "caps": ("CapReport", "ClampCap"),
    "central": ("CentralGaussian", "CentralLaplace"),
    "clipping": ("COUNT_WEIGHT", "Clipping", "adapted_norm"),
    "composition": (
        "composed",
        "composed_rho",
        "gaussian_rho",
        "group_event",
        "group_rho",
        "pure_rho",
        "zcdp_delta",
        "zcdp_epsilon",
        "zcdp_rho",
    ),
    "discrete_gaussian": ("DiscreteGaussianSampler",),
    "discrete_laplace": ("DiscreteLaplaceSampler", "usable_bound"),
    "entropy": ("NoisePool",),
    "events": ("ApproximateEvent", "PrivacyLossEvent"),
    "filters": ("BudgetExceededError", "RenyiFilter", "ZcdpFilter", "best_order"),
    "gaussian": ("DiscretisedGaussian", "NOISE_SHARE", "fine_steps_for", "require_noise_as_priced"),
    "grid": ("Constrained", "FINE_STEPS", "Grid", "Norm", "l1_fine_steps"),
    "laplace": ("DiscretisedLaplace",),
    "layer_ranges": ("LayerRange", "adapted_ranges"),
    "mechanism": ("Mechanism",),
    "pld": ("PldAccountant", "loss_grid", "running_pld_epsilon"),
    "published": ("PublishedCap",),
    "release_loss": ("MIN_SIGMA_STEPS",),
    "sampling": ("poisson_lot", "shuffled"),
    "schedules": ("Schedule",),
    "shuffling": ("Bound", "ShuffledBatch", "central_delta", "central_epsilon", "least_reports"),
    "statement": ("Adjacency", "BudgetStatement", "Trust", "Unit"),
    "truncated_laplace": ("TruncatedLaplace",),
    "two_point": ("TwoPoint",),
    "two_point_budget": ("coordinate_statement", "device_statement", "shuffled_statement"),
    "wire": ("coarsen", "wire_shift", "wire_width"),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
