"""``dpagent plan``, as a script and as a person use it: figures, page and explanation."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from commands import TIMEOUT_S, command_line, dpagent
from dp_accounting.pld import PLDAccountant
from plans import plan_json, rows_under

from dpagent.learning.training.engine import ACCUMULATION_SLACK
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.calibration import calibrate, gaussian_family
from dpagent.privacy.mechanisms.bounded import BoundedCap, BoundedJob
from dpagent.privacy.mechanisms.central import CentralGaussian, CentralLaplace
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian, finest_resolution
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE, Query
from dpagent.privacy.schedules import Schedule
from dpagent.privacy.statement import Trust

KINDS = ["uniform", "incrementing", "linear"]
DELTA = 1e-5 * (1 - NOISE_SHARE)
"""Of exact noise, where the target's is 1e-5."""


@pytest.mark.heavy
def test_json_meets_the_target_by_an_independent_accountant() -> None:
    plan = plan_json("--epsilon", "2", "--rounds", "10", "--sampling-rate", "0.1")
    assert (plan["delta"], plan["sampling_rate"]) == (1e-5, 0.1)
    assert [entry["schedule"]["kind"] for entry in plan["schedules"]] == KINDS
    for entry in plan["schedules"]:
        assert len(entry["noise_multipliers"]) == len(entry["epsilon"]) == 10
        assert entry["epsilon"] == sorted(entry["epsilon"])
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        for noise in entry["noise_multipliers"]:
            accountant.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(noise)))
        assert accountant.get_epsilon(1e-5) == pytest.approx(2, rel=1e-3), entry["schedule"]
        assert entry["epsilon"][-1] <= 2


def test_json_has_every_schedule_as_the_library_makes_it() -> None:
    plan = plan_json(
        "--rounds", "9", "--step", "0.5", "--ratio", "4", "--local-steps", "2",
        "--devices", "200", "--records-per-device", "500", "--parameters", "1000",
    )  # fmt: skip
    assert [entry["schedule"]["kind"] for entry in plan["schedules"]] == KINDS
    assert [entry["chosen"] for entry in plan["schedules"]] == [False, True, False]
    for entry, kind in zip(plan["schedules"], KINDS, strict=True):
        schedule = Schedule(kind=kind, step=0.5, ratio=4.0)  # type: ignore[arg-type]
        made = calibrate(schedule, gaussian_family(0.1, steps=2), epsilon=2, delta=DELTA, rounds=9)
        assert entry["noise_multipliers"] == list(made.noise_multipliers)
        assert entry["epsilon"] == list(made.epsilon_by_round)
        assert entry["shares"] == schedule.shares(9).tolist()
        units = finest_resolution(max(entry["noise_multipliers"]))
        sensitivity = (units + math.ceil(ACCUMULATION_SLACK * units) + 32 + 1) / units  # 32 = ⌈√1000⌉
        for sigma, coordinate, mean in zip(
            entry["noise_multipliers"],
            entry["coordinate_noise_clip_norms"],
            entry["mean_noise_clip_norms"],
            strict=True,
        ):
            # Sums of 200 devices with 2 steps each, divided by 200 · 2 · 50 records.
            deviation = sigma * sensitivity * math.sqrt(400)
            assert coordinate == pytest.approx(deviation / (200 * 2 * 50), rel=1e-12)
            assert mean == pytest.approx(coordinate * math.sqrt(1000), rel=1e-12)
    chosen = plan["schedules"][1]
    assert plan["noise_multipliers"] == chosen["noise_multipliers"]
    assert plan["epsilon"] == chosen["epsilon"]
    assert plan["schedule"] == chosen["schedule"] == {"kind": "incrementing", "step": 0.5}
    assert plan["fleet"] == {
        "devices": 200, "records_per_device": 500.0, "parameters": 1000, "expected_lot": 50.0,
    }  # fmt: skip


def test_json_carries_the_budget_statement() -> None:
    plan = plan_json("--rounds", "3", "--epsilon", "1.5", "--delta", "1e-6")
    statement = plan["statement"]
    assert (statement["epsilon"], statement["delta"]) == (1.5, 1e-6)
    assert statement["guarantee"] == "differential privacy"
    assert len(statement["assumptions"]) >= 2
    for key in ("unit", "adjacency", "trust"):
        assert plan[key] == statement[key]
    empty = DiscretisedGaussian.job_statement(0.0, 0.0)
    assert set(statement) == set(empty.as_dict())


def test_json_has_the_price_of_every_cap() -> None:
    plan = plan_json("--rounds", "20", "--epsilon", "3")
    caps = {cap["kind"]: cap["statement"] for cap in plan["caps"]}
    assert list(caps) == ["none", "clamp", "bounded", "published"]
    assert caps["none"] == caps["clamp"] == plan["statement"]
    assert (caps["bounded"]["epsilon"], caps["bounded"]["delta"]) == (3.0, 1e-5)
    assert caps["published"]["guarantee"] == "none"
    assert caps["published"]["epsilon"] is None
    # Figures of the caps may stand in one column: they have one scope.
    assert len({(cap["unit"], cap["adjacency"], cap["trust"]) for cap in caps.values()}) == 1


@pytest.mark.parametrize("arguments", [[], ["--sampling-rate", "1"], ["--local-steps", "3"]])
def test_bounded_cap_keeps_to_the_published_formula(arguments: list[str]) -> None:
    plan = plan_json("--rounds", "20", "--epsilon", "3", "--schedule", "incrementing", *arguments)
    bounded, rate, steps = plan["bounded_cap"], plan["sampling_rate"], plan["local_steps"]
    delta = DELTA / (20 * steps) / rate
    assert bounded["step_delta"] == pytest.approx(delta * rate, rel=1e-12, abs=0)
    # Of a sum on the grid of such a job: a unit a coordinate, and what summing in float32 adds.
    schedule = Schedule("incrementing", step=plan["schedules"][1]["schedule"]["step"])
    job = BoundedJob(3.0, 1e-5, 20, schedule, BoundedCap(1.0, 1.0), 1.0)
    sensitivity = 1 + ACCUMULATION_SLACK + 26_010 / job.resolution(rate, steps)

    def cap_at(epsilon: float) -> float:
        return sensitivity * math.log(1 + (math.exp(epsilon) - 1) / (2 * delta)) / epsilon

    assert len(bounded["prices"]) >= 5
    for price in bounded["prices"]:
        # The sampler's own A is smaller by up to 0.013 %, and rounding up to whole units is less.
        assert cap_at(price["release_epsilon"]) == pytest.approx(price["cap_l1_clip_norms"], rel=2e-4)
        amplified = math.log(1 + rate * (math.exp(price["release_epsilon"]) - 1))
        assert price["step_epsilon"] == pytest.approx(amplified, rel=1e-9)
        assert price["job_epsilon"] == pytest.approx(20 * steps * amplified, rel=1e-9)
    shares = Schedule().shares(20)
    for key, share in (("first_round", shares[0]), ("last_round", shares[-1])):
        release = math.log(1 + (math.exp(3 * share / steps) - 1) / rate)
        assert bounded[f"{key}_l1_clip_norms"] == pytest.approx(cap_at(release), rel=2e-4)


def test_json_to_a_file_prints_nothing(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = dpagent("plan", "--rounds", "3", "--json", str(file))
    assert (result.returncode, result.stdout) == (0, "")
    assert len(json.loads(file.read_text())["epsilon"]) == 3


def test_json_to_a_missing_directory_is_a_sentence(tmp_path: Path) -> None:
    result = dpagent("plan", "--rounds", "3", "--json", str(tmp_path / "no" / "plan.json"))
    assert result.returncode == 8
    assert "no/plan.json" in result.stderr
    assert "Traceback" not in result.stderr


def test_page_shows_schedules_side_by_side_and_the_rounds_beside_uniform() -> None:
    arguments = ("--devices", "200", "--epsilon", "3", "--rounds", "60", "--schedule", "incrementing")
    page, plan = dpagent("plan", *arguments).stdout, plan_json(*arguments)
    first = " ".join(page.splitlines()[:2])
    for word in ("ε = 3", "δ = 1e-5", "record-level", "add-or-remove-one", "trusted party: none"):
        assert word in first
    assert "200 devices" in page
    rows = rows_under(page.replace(" *", "*"), "schedule", "first", "last")
    assert [row[0] for row in rows[:3]] == ["uniform", "incrementing*", "linear"]
    for row, entry in zip(rows, plan["schedules"], strict=False):
        sigmas, mean = entry["noise_multipliers"], entry["mean_noise_clip_norms"]
        spent = [entry["epsilon"][number - 1] for number in (15, 30, 60)]
        assert [float(cell) for cell in row[1:]] == pytest.approx(
            [
                *(sigmas[0], sigmas[-1]),
                *(100 * entry["shares"][0], 100 * entry["shares"][-1]),
                *(mean[0], mean[-1]),
                *spent,
            ],
            rel=0.03,
        )
        # A bound is never rounded down.
        assert all(float(cell) >= value for cell, value in zip(row[-3:], spent, strict=True))
    rows = rows_under(page, "round", "σ")
    numbers = [int(row[0]) for row in rows]
    assert len(numbers) == 12
    assert (numbers[0], numbers[-1]) == (1, 60)
    incrementing, uniform = ([float(row[column]) for row in rows] for column in (1, 4))
    assert incrementing == sorted(incrementing, reverse=True)
    assert len(set(uniform)) == 1
    assert incrementing[0] > uniform[0] > incrementing[-1]
    for words in ("truncated Laplace", "clipped in L1", "pure composition", "owner allows that"):
        assert words in " ".join(page.split())


def test_all_rounds_are_shown_on_demand_and_uniform_not_twice() -> None:
    page = dpagent("plan", "--rounds", "30", "--schedule", "uniform", "--all-rounds").stdout
    rows = rows_under(page, "round", "σ")
    assert [int(row[0]) for row in rows] == list(range(1, 31))
    assert {len(row) for row in rows} == {4}


def test_lines_fit_80_columns() -> None:
    page = dpagent("plan", "--devices", "200", "--epsilon", "3", "--rounds", "100", COLUMNS="80").stdout
    assert max(map(len, page.splitlines())) <= 80
    assert "noise multiplier σ by round" in page


@pytest.mark.parametrize("columns", ["0", "20"])
@pytest.mark.parametrize("arguments", [[], ["--explain"]])
def test_narrow_terminals_get_text(columns: str, arguments: list[str]) -> None:
    result = dpagent("plan", "--rounds", "5", *arguments, COLUMNS=columns)
    assert (result.returncode, result.stderr) == (0, "")
    assert "uniform" in result.stdout


@pytest.mark.heavy
@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "latin-1"},
    ],
)
@pytest.mark.parametrize("arguments", [[], pytest.param(["--explain"], marks=pytest.mark.slow)])
def test_poor_terminals_get_text(environment: dict[str, str], arguments: list[str]) -> None:
    result = subprocess.run(
        command_line("plan", "--rounds", "5", *arguments),
        capture_output=True, timeout=TIMEOUT_S, check=False, env=os.environ | environment,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"uniform" in result.stdout
    if environment.get("PYTHONIOENCODING"):
        assert "┤".encode() not in result.stdout


@pytest.mark.parametrize("arguments", [[], ["--json", "-"]])
def test_a_reader_that_leaves_is_no_error(arguments: list[str]) -> None:
    child = subprocess.Popen(
        command_line("plan", "--rounds", "3", *arguments),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == ""
    child.stderr.close()
    assert child.wait(timeout=TIMEOUT_S) == 0


def test_explanation_states_the_guarantee_with_the_plans_numbers() -> None:
    result = dpagent("plan", "--epsilon", "3", "--rounds", "60", "--devices", "200", "--explain")
    assert result.returncode == 0, result.stderr
    words = " ".join(result.stdout.split())
    for expected in (
        "ε = 3",
        "δ = 1e-5",
        "one record on one device",
        "add-or-remove-one",
        Trust.NONE.meaning,
        "20.1-fold",
        "at most 95.3 % of the time",
        "0.01 of them",
        "10 records that is 30",
        "200 devices",
        "probability 0.1",
        "Not" if "Not covered" in words else "not covered",
    ):
        assert expected in words
    assert math.exp(3) <= 20.1
    assert (math.exp(3) + 1e-5) / (1 + math.exp(3)) <= 0.953
    # The same words for a script.
    plan = plan_json("--epsilon", "3", "--rounds", "60", "--devices", "200", "--explain")
    for section in plan["explanation"]:
        assert section["title"] in words
        for paragraph in section["paragraphs"]:
            assert " ".join(paragraph.split()) in words


@pytest.mark.parametrize("epsilon", ["0.1", "20", "1000"])
def test_explanation_holds_for_any_epsilon(epsilon: str) -> None:
    result = dpagent("plan", "--epsilon", epsilon, "--rounds", "2", "--delta", "1e-3", "--explain")
    assert result.returncode == 0, result.stderr
    for share in re.findall(r"([\d.]+) %", result.stdout):
        assert 0 <= float(share) <= 100
    assert ("Lower ε" in result.stdout) is (float(epsilon) > 8)


@pytest.mark.parametrize(("noise", "kind"), [("gaussian", CentralGaussian), ("laplace", CentralLaplace)])
def test_a_plan_for_noise_at_the_coordinator_is_for_devices_and_one_noise_a_round(
    noise: str, kind: type[CentralGaussian | CentralLaplace]
) -> None:
    plan = plan_json(
        "--method", "central", "--noise", noise, "--devices", "50", "--rounds", "6", "--epsilon", "5",
        "--parameters", "650",
    )  # fmt: skip
    assert (plan["unit"], plan["adjacency"], plan["trust"]) == ("device", "zero-out", "coordinator")
    assert (plan["sampling_rate"], plan["local_steps"], plan["fleet"]["expected_lot"]) == (1, 1, None)
    assert plan["bounded_cap"] is None
    assert [cap["kind"] for cap in plan["caps"]] == ["none"]
    chosen = next(each for each in plan["schedules"] if each["chosen"])
    assert chosen["schedule"]["kind"] == "uniform"
    made = calibrate(Schedule(kind="uniform"), kind.family(1.0), epsilon=5, delta=DELTA, rounds=6)
    assert chosen["noise_multipliers"] == list(made.noise_multipliers)
    # Noise once, on the sum of fifty updates, whose sensitivity rounding to their grid adds to.
    spread = kind.deviation_per_multiplier * made.noise_multipliers[0] / 50
    assert spread <= chosen["coordinate_noise_clip_norms"][0] <= spread * (1 + 1 / 64)
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    one = dp_accounting.GaussianDpEvent if noise == "gaussian" else dp_accounting.LaplaceDpEvent
    accountant.compose(one(made.noise_multipliers[0]), 6)
    assert accountant.get_epsilon(1e-5) <= 5 * 1.001


@pytest.mark.parametrize("noise", [pytest.param("gaussian", marks=pytest.mark.slow), "laplace"])
def test_noise_of_devices_is_planned_beside_the_coordinators(noise: str) -> None:
    options = ("--method", "central", "--noise", noise, "--devices", "50", "--rounds", "6", "--epsilon", "5")
    alone, plan = plan_json(*options), plan_json(*options, "--device-noise", "30")
    assert alone["device_noise"] is None
    assert plan["noise_multipliers"] == alone["noise_multipliers"]
    stated = plan["device_noise"]["statement"]
    assert (stated["unit"], stated["adjacency"], stated["trust"]) == ("device", "replace-one", "none")
    multipliers = plan["device_noise"]["noise_multipliers"]
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    one = dp_accounting.GaussianDpEvent if noise == "gaussian" else dp_accounting.LaplaceDpEvent
    accountant.compose(one(multipliers[0]), 6)
    assert accountant.get_epsilon(1e-5) <= 30 * 1.001
    assert plan["device_noise"]["epsilon"][-1] == pytest.approx(30, rel=1e-3)
    # On the mean of fifty updates: the coordinator's noise once, and fifty times a device's, over twice the
    # norm of an update.
    chosen = next(each for each in plan["schedules"] if each["chosen"])
    each = math.sqrt(50) * 2 * multipliers[0]
    spread = (
        (1 if noise == "gaussian" else math.sqrt(2)) * math.hypot(plan["noise_multipliers"][0], each) / 50
    )
    assert chosen["coordinate_noise_clip_norms"][0] == pytest.approx(spread, rel=1e-2)
    page = " ".join(dpagent("plan", *options, "--device-noise", "30").stdout.split())
    assert "ε = 30, δ = 1e-5 (device-level, replace-one adjacency, trusted party: none)" in page
    explained = " ".join(dpagent("plan", *options, "--device-noise", "30", "--explain").stdout.split())
    assert "Against the coordinator too" in explained


def test_a_plan_with_less_noise_of_devices_than_can_be_drawn_says_so() -> None:
    """Drawn on the grid that a coordinator would choose: on a finer one, more is added to δ, and no device
    would take 49.2 either."""
    options = ("--method", "central", "--rounds", "10", "--parameters", "650", "--epsilon", "8")
    for epsilon, refused in (("49.2", False), ("49.3", True)):
        page = " ".join(dpagent("plan", *options, "--device-noise", epsilon).stdout.split())
        assert ("No device would accept this plan. Its round 1: noise as it is drawn" in page) is refused


def test_the_words_of_a_plan_for_noise_at_the_coordinator_speak_of_devices() -> None:
    options = ("plan", "--method", "central", "--devices", "50", "--rounds", "6")
    page = " ".join(dpagent(*options).stdout.split())
    assert "trusted party: coordinator" in page
    assert "50 devices, each of which sends an update a round" in page
    assert "the update is at most 1 long" in page
    for word in ("lot", "gradient", "bounded", "record"):
        assert word not in page, word
    explained = " ".join(dpagent(*options, "--explain").stdout.split())
    assert "not against the coordinator" in explained
    assert "whether one device sent its update or zeros" in explained
    assert "none is drawn in secret" in explained


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-3), (0.3, 1e-5), (0.1, 0.09), (0.9, 1e-9)])
def test_what_is_said_of_ten_records_of_one_person_is_a_bound(epsilon: float, delta: float) -> None:
    """Their δ is more than ten times as large: it adds up in ten steps, each a factor of e^ε greater."""
    options = ["--epsilon", epsilon, "--delta", delta, "--rounds", 3, "--sampling-rate", 0.1]
    result = dpagent("plan", *map(str, options), "--explain")
    assert result.returncode == 0, result.stderr
    words = " ".join(result.stdout.split())
    of_ten = sum(delta * math.exp(step * epsilon) for step in range(10))
    correct = (math.exp(10 * epsilon) + of_ten) / (1 + math.exp(10 * epsilon))
    if of_ten >= 1 or 10 * epsilon >= 8:
        assert "which protects little" in words
        return
    (said,) = re.findall(r"which limits a guess from even odds to ([0-9.]+) %", words)
    assert correct <= float(said) / 100 <= correct + 0.0011


def test_an_epsilon_of_many_digits_is_explained_rounded_up() -> None:
    """Before, to the nearest of four digits."""
    options = ["--epsilon", "1.2344121", "--rounds", "3", "--sampling-rate", "0.1"]
    words = " ".join(dpagent("plan", *options, "--explain").stdout.split())
    assert "What ε = 1.23442 means" in words
    assert "12.3442" in words
    assert "1.234 " not in words


@pytest.mark.parametrize("arguments", [[], ["--sampling-rate", "1"], ["--local-steps", "3"]])
def test_a_bounded_cap_is_said_to_cost_what_devices_charge_for_it(arguments: list[str]) -> None:
    """By the rule of the job itself: for weights whose greatest pull is the cap."""
    plan = plan_json("--rounds", "100", "--epsilon", "50", "--schedule", "uniform", *arguments)
    rate, steps, prices = plan["sampling_rate"], plan["local_steps"], plan["bounded_cap"]["prices"]
    query = Query(1.0, ACCUMULATION_SLACK, 26_010, rate, steps)
    assert len(prices) >= 5
    capped = 0
    for price in prices:
        job = BoundedJob(50.0, 1e-5, 100, Schedule("uniform"), BoundedCap(1.0, 1e-9), 1.0)
        weights = np.full(26_010, price["cap_l1_clip_norms"])
        found = job.round(1, query, weights, spent=0.0, resolution=job.resolution(rate, steps))
        charged = composed(found.mechanism.event).epsilon
        if found.is_capped:
            assert charged == pytest.approx(price["job_epsilon"] / 100, rel=1e-11)
            capped += 1
        else:
            assert price["job_epsilon"] / 100 < charged == pytest.approx(0.5)
    assert capped >= 2
