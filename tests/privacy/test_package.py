"""A board loads what it runs, and no more."""

from __future__ import annotations

import subprocess
import sys


def test_the_agent_carries_only_what_it_runs() -> None:
    program = (
        "import sys, agent.pricing_program; print(*sorted(m for m in sys.modules if 'dpagent.privacy.' in m))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "dpagent.privacy.accounting.pld" in loaded
    names = {module.rpartition(".")[2] for module in loaded}
    assert not names & {"shuffling", "finite_loss", "two_point_budget", "filters"}
