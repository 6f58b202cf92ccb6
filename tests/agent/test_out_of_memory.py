"""Which of an agent's programs the system ends first where memory runs out, by what the kernel is told."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from devices import KEY, WEIGHTS
from fleets import make_plan, terms, write_agent
from neighbours import decode_here

from agent.settings import load_agent_settings
from agent.training_messages import Order
from cli.service.unit import packaged

AGENT = """
    import os
    import pickle
    import sys
    from pathlib import Path
    from agent.errand import Errand
    from agent.looks import Looks
    from agent.owners_command import OwnersCommand
    from agent.profile import open_profile
    from agent.settings import load_agent_settings
    from agent.worker import Worker

    SCORE = Path("/proc/self/oom_score_adj")
    SCORE.write_text(sys.argv[2])
    settings = load_agent_settings(Path(sys.argv[1]))
    looks = Looks(settings.data, settings.state_dir, niceness=0)
    command = OwnersCommand(["/bin/sleep", "600"], reads_records=True)
    of_command = os.open(f"/proc/{command.process}/oom_score_adj", os.O_RDONLY)
    # At one call: the rest of a number that changes meanwhile is that of another.
    while (first := os.pread(of_command, 16, 0).decode().strip()) == sys.argv[2]:
        pass
    errand = Errand("agent.pricing_program", stays=True)
    errand.ask(None).result()
    training = Worker(settings, open_profile(settings.profile).profile, looks)
    training.prepare(pickle.load(sys.stdin.buffer)).result()
    others = (errand._process.pid, training._running._process.pid, "self")
    print(first, *(Path(f"/proc/{each}/oom_score_adj").read_text().strip() for each in others))
    command.end()
    errand.end()
    training.end()
"""


def score_in_unit() -> int:
    (unit,) = (
        text for file, text in packaged(Path("dpagent")).items() if file.name == "dpagent-agent.service"
    )
    (score,) = re.findall(r"^OOMScoreAdjust=(\d+)$", unit, re.MULTILINE)
    return int(score)


@pytest.mark.usefixtures("executed")
@pytest.mark.parametrize("score", [0, score_in_unit(), 990])
def test_what_reads_records_ends_first_then_errands_training_and_the_agent(
    tmp_path: Path, score: int
) -> None:
    """Before, an errand beside an agent that systemd had started was as likely to end as that was, and if it
    took less memory, less likely than training, on which a round had been charged."""
    config = write_agent(tmp_path, None, KEY, engine="numpy")
    settings = load_agent_settings(config)
    settings.state_dir.mkdir(exist_ok=True)
    decode_here(settings.data, settings.state_dir)
    agent = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AGENT), str(config), str(score)],
        input=pickle.dumps(Order(make_plan(**terms(rate=1.0)), WEIGHTS, {}, None)),
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    command, errand, training, itself = map(int, agent.stdout.split())
    assert (command, itself) == (1_000, score)
    assert command > errand >= training > itself
    assert errand > training or training == 999, "there is no more room in between"


def test_no_program_ends_after_an_agent_that_ends_first_itself() -> None:
    """As those of some containers do."""
    program = "from agent.priority import _ENDS_BY as score, end_before_parent; score.write_text('1000');"
    program += "end_before_parent(50); print(score.read_text())"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(said.stdout) == 1_000
