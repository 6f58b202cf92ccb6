"""What a coordinator says that its jobs cost is no less than what a board's ledger reserves for them.

Both price the same rounds by themselves: the coordinator when it queues a job, a board by the plan that it is
sent. Whoever reads the registry, the auditor's file or ``job list`` in place of a ledger is told no less.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleets import SEALING_KEY, records, write_fleet
from ledgers import LIMITS

from agent.accounts import Books, JobAccounts
from agent.admission import admit
from agent.charges import Budget
from agent.priced_charges import charge_of
from coordinator.columns import promised_by, together
from coordinator.job import Job
from coordinator.participation import totals
from coordinator.planning import Planner, new_job
from coordinator.registry import Spent
from coordinator.settings import load_fleet_settings
from coordinator.stepping import Stepper
from coordinator.store import OpenRound
from dpagent.privacy.methods import METHODS
from dpagent.privacy.statement import Adjacency, Trust, Unit
from dpagent.protocol.weights import weights_to_bytes

NAME = "digits"
BUDGETS = {NAME: Budget(1_000.0, 0.1), f"{NAME}@coordinator": Budget(1_000.0, 0.1)}
COLUMNS = {
    NAME: (Unit.RECORD, Adjacency.ADD_OR_REMOVE_ONE, Trust.NONE),
    f"{NAME}@coordinator": (Unit.DEVICE, Adjacency.ZERO_OUT, Trust.COORDINATOR),
}
JOBS: dict[str, dict[str, Any]] = {
    # The bound that boards have of it was the higher one, by 5e-8 of itself.
    "sums": {"epsilon": 1.2344999, "delta": 1.2345641e-5, "sampling_rate": 0.5},
    "sums by a quantile": {"epsilon": 2.0, "clipping": {"kind": "quantile"}},
    "sums in L1": {"method": "incrementing", "noise": "laplace", "epsilon": 3.3},
    "reports": {"method": "ldp-fl", "epsilon": 40.0},
    "updates": {"method": "central", "epsilon": 2.331939260868195, "delta": 4.736634791447453e-09},
    "updates with noise": {"method": "central", "epsilon": 4.0, "device_noise": {"epsilon": 20.0}},
}


def begun(directory: Path, privacy: dict[str, Any], books: JobAccounts) -> Job:
    """A job, of which a board is charged for the first round."""
    whole = {"delta": 1e-6} | ({} if "method" in privacy else {"sampling_rate": 0.2}) | privacy
    settings = load_fleet_settings(
        write_fleet(directory, None, rounds=3, privacy=whole, cap={"kind": "none"})
    )
    spec, job = settings.model.spec(), new_job(settings)
    model = Stepper(settings, spec).initial()
    task = Planner(settings, spec, job, SEALING_KEY).task(
        OpenRound(1, 0.0, 4e9), weights_to_bytes(model.weights, settings.model.precision),
        clip_norm=model.clip_norm, radii=model.radii,
    )  # fmt: skip
    limits = LIMITS.with_values(
        {"methods": tuple(METHODS), "trust": (Trust.NONE, Trust.COORDINATOR), "maximum_job_epsilon": 100.0}
    )
    for price in admit(task, records(20), Books(books, BUDGETS, 0), NAME, limits, now=0.0):
        books.add(charge_of(task, price, charged_at="2026-11-27T00:00:00+00:00"))
    return job


def test_no_column_of_the_coordinators_is_below_the_account_of_a_board(tmp_path: Path) -> None:
    books, jobs, granted = JobAccounts(), [], []
    for number, (kind, privacy) in enumerate(JOBS.items()):
        job = begun(tmp_path / str(number), privacy, books)
        jobs.append((kind, job))
        granted += [Spent(job.id.hex(), 1, each.as_dict()) for each in promised_by(job)]
        registry = {each.scope: each for each in totals(granted)}
        listed = {each.scope: each for _, each in together(jobs)}
        for account, column in COLUMNS.items():
            reserved = books.reserved(account)
            for said in (registry, listed):
                if reserved.epsilon:
                    # But for the order in which each adds up.
                    assert said[column].epsilon >= reserved.epsilon * (1 - 1e-12), (kind, account)
                    assert said[column].delta >= reserved.delta * (1 - 1e-12), (kind, account)
    assert all(books.reserved(account).epsilon for account in COLUMNS)
