"""The long run: one job after another under fire until there were so many kills.

``make test-kills ARGS="--kills 1000 --seed 7"`` prints each broken promise as it is found, keeps the
directory of its job, and ends with the number of kills of each kind. Its exit code is 1 if any promise was
broken.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from crash.fleet_under_fire import (
    METHODS,
    MIXER,
    PATIENT_S,
    PROGRAMS,
    SHARED_PROGRAMS,
    FleetUnderFire,
    RandomKills,
    launcher,
)
from launching import starts

from benchmarks.postgresql_server import PostgresqlServer


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--a-job", type=int, default=40, help="most kills of one job")
    parser.add_argument(
        "--shared", action="store_true",
        help="keep the coordinator's state in PostgreSQL, with two workers and a coordinator that stands by",
    )  # fmt: skip
    options = parser.parse_args()
    choices, began = random.Random(options.seed), time.monotonic()
    kills: Counter[str] = Counter()
    jobs = broken = 0
    print(f"seed {options.seed}", flush=True)
    with ExitStack() as servers, launcher() as programs:
        servers.callback(starts.close)
        postgresql = None
        if options.shared:
            postgresql = servers.enter_context(PostgresqlServer(durable=False))
        own = PROGRAMS if postgresql is None else SHARED_PROGRAMS
        while kills.total() < options.kills:
            directory = Path(tempfile.mkdtemp(prefix="dpagent-kills-"))
            seed, is_mixed = choices.randrange(1 << 32), choices.random() < 0.3
            method = choices.choice([*METHODS])
            under_fire = RandomKills(seed, options.a_job, (*own, MIXER) if is_mixed else own)
            deadline_s = choices.choice([PATIENT_S, PATIENT_S, 0.8])
            with FleetUnderFire(
                directory,
                programs,
                method=method,
                deadline_s=deadline_s,
                is_mixed=is_mixed,
                postgresql=postgresql,
            ) as fleet:
                outcome = fleet.run(under_fire.fault, under_fire.strike)
            jobs += 1
            kills += outcome.kills
            broken += len(outcome.broken)
            for promise in outcome.broken:
                print(f"job {jobs} in {directory}: {promise}", flush=True)
            if not outcome.broken:
                shutil.rmtree(directory)
            print(
                f"job {jobs}, {method}: {outcome.kills.total()} kills in {outcome.seconds:.1f} s; "
                f"all jobs: {kills.total()} kills, {broken} broken promises",
                flush=True,
            )
    for name, count in sorted(kills.items()):
        print(f"{count:6d} {name}")
    print(
        f"{kills.total()} kills in {jobs} jobs and {time.monotonic() - began:.0f} s, seed {options.seed}: "
        f"{broken} broken promises"
    )
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
