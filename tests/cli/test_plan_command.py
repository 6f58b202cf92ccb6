"""``dpagent plan``, as a script and as a person use it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import yaml
from commands import command_line, dpagent
from dp_accounting.pld import PLDAccountant
from typer.testing import CliRunner

from cli.main import app
from coordinator.planning import Planner, new_job
from coordinator.settings import FleetSettings, load_fleet_settings
from dpagent.errors import DpagentError, ParameterError, PlanError
from dpagent.learning.training.engine import ACCUMULATION_SLACK
from dpagent.privacy.calibration import calibrate, gaussian_family
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian, finest_resolution
from dpagent.privacy.mechanisms.truncated_laplace import TruncatedLaplace
from dpagent.privacy.schedules import Schedule
from dpagent.privacy.statement import Trust

KINDS = ["uniform", "incrementing", "linear"]


def plan_json(*arguments: str) -> dict[str, Any]:
    """What the command tells a script, in this process."""
    result = CliRunner().invoke(app, ["plan", *arguments, "--json", "-"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert isinstance(plan, dict)
    return plan


def refusal(*arguments: str) -> DpagentError:
    """The error with which the command refuses to plan, in this process."""
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(result.exception, DpagentError), result.output
    assert result.output == ""
    return result.exception


def rows_under(output: str, *heads: str) -> list[list[str]]:
    """The rows of the table whose header's last line has these words, split at white space."""
    lines = output.splitlines()
    start = next(n for n, line in enumerate(lines) if line.split()[: len(heads)] == list(heads))
    rows: list[list[str]] = []
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        rows.append(line.split())
    return rows


@pytest.mark.heavy
@pytest.mark.parametrize("schedule", KINDS)
def test_json_meets_the_target_by_an_independent_accountant(schedule: str) -> None:
    plan = plan_json(
        "--epsilon", "2", "--rounds", "60", "--sampling-rate", "0.1", "--schedule", schedule
    )  # fmt: skip
    assert plan["schedule"]["kind"] == schedule
    assert (plan["delta"], plan["sampling_rate"]) == (1e-5, 0.1)
    assert len(plan["noise_multipliers"]) == len(plan["epsilon"]) == 60
    assert plan["epsilon"] == sorted(plan["epsilon"])
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for noise in plan["noise_multipliers"]:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(noise)))
    assert accountant.get_epsilon(1e-5) == pytest.approx(2, rel=1e-3)
    assert plan["epsilon"][-1] <= 2


def test_json_has_every_schedule_as_the_library_makes_it() -> None:
    plan = plan_json(
        "--rounds", "9", "--step", "0.5", "--ratio", "4", "--local-steps", "2",
        "--devices", "200", "--records-per-device", "500", "--parameters", "1000",
    )  # fmt: skip
    assert [entry["schedule"]["kind"] for entry in plan["schedules"]] == KINDS
    assert [entry["chosen"] for entry in plan["schedules"]] == [False, True, False]
    for entry, kind in zip(plan["schedules"], KINDS, strict=True):
        schedule = Schedule(kind=kind, step=0.5, ratio=4.0)  # type: ignore[arg-type]
        made = calibrate(schedule, gaussian_family(0.1, steps=2), epsilon=2, delta=1e-5, rounds=9)
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
    plan = plan_json("--rounds", "20", "--epsilon", "3", *arguments)
    bounded, rate, steps = plan["bounded_cap"], plan["sampling_rate"], plan["local_steps"]
    delta = 1e-5 / (20 * steps) / rate
    assert bounded["step_delta"] == pytest.approx(delta * rate, rel=1e-12)
    grid = TruncatedLaplace.for_cap(1.0, 10.0, delta, rate, 26_010).grid
    sensitivity = grid.sensitivity_units * grid.granularity
    assert 1 <= sensitivity < 1.01

    def cap_at(epsilon: float) -> float:
        return sensitivity * math.log(1 + (math.exp(epsilon) - 1) / (2 * delta)) / epsilon

    assert len(bounded["prices"]) >= 5
    for price in bounded["prices"]:
        # The sampler's own A is smaller by up to 0.013 %.
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
    arguments = ("--devices", "200", "--epsilon", "3", "--rounds", "150")
    page, plan = dpagent("plan", *arguments).stdout, plan_json(*arguments)
    first = " ".join(page.splitlines()[:2])
    for word in ("ε = 3", "δ = 1e-5", "record-level", "add-or-remove-one", "trusted party: none"):
        assert word in first
    assert "200 devices" in page
    rows = rows_under(page.replace(" *", "*"), "schedule", "first", "last")
    assert [row[0] for row in rows[:3]] == ["uniform", "incrementing*", "linear"]
    for row, entry in zip(rows, plan["schedules"], strict=False):
        sigmas, mean = entry["noise_multipliers"], entry["mean_noise_clip_norms"]
        spent = [entry["epsilon"][number - 1] for number in (38, 75, 150)]
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
    assert (numbers[0], numbers[-1]) == (1, 150)
    incrementing, uniform = ([float(row[column]) for row in rows] for column in (1, 4))
    assert incrementing == sorted(incrementing, reverse=True)
    assert len(set(uniform)) == 1
    assert incrementing[0] > uniform[0] > incrementing[-1]
    for words in ("truncated Laplace", "clipped in L1", "pure composition", "allow_unproven"):
        assert words in " ".join(page.split())


def test_all_rounds_are_shown_on_demand_and_uniform_not_twice() -> None:
    page = dpagent("plan", "--rounds", "30", "--schedule", "uniform", "--all-rounds").stdout
    rows = rows_under(page, "round", "σ")
    assert [int(row[0]) for row in rows] == list(range(1, 31))
    assert {len(row) for row in rows} == {4}


def test_lines_fit_80_columns() -> None:
    page = dpagent("plan", "--devices", "200", "--epsilon", "3", "--rounds", "5000", COLUMNS="80").stdout
    assert max(map(len, page.splitlines())) <= 80
    assert "noise multiplier σ by round" in page


@pytest.mark.heavy
@pytest.mark.parametrize(
    "environment",
    [
        {"COLUMNS": "20"},
        {"COLUMNS": "0"},
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "latin-1"},
    ],
)
@pytest.mark.parametrize("arguments", [[], ["--explain"]])
def test_poor_terminals_get_text(environment: dict[str, str], arguments: list[str]) -> None:
    result = subprocess.run(
        command_line("plan", "--rounds", "5", *arguments),
        capture_output=True, timeout=60, check=False, env=os.environ | environment,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"incrementing" in result.stdout
    if environment.get("PYTHONIOENCODING"):
        assert "┤".encode() not in result.stdout


@pytest.mark.parametrize("arguments", [[], ["--explain"], ["--json", "-"]])
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
    assert child.wait(timeout=60) == 0


def test_explanation_states_the_guarantee_with_the_plans_numbers() -> None:
    result = dpagent("plan", "--epsilon", "3", "--rounds", "150", "--devices", "200", "--explain")
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
    plan = plan_json("--epsilon", "3", "--rounds", "150", "--devices", "200", "--explain")
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


def test_custom_weights_join_the_comparison_and_are_chosen() -> None:
    plan = plan_json("--custom", "1, 2,1, 4")
    assert [entry["schedule"]["kind"] for entry in plan["schedules"]] == [*KINDS, "custom"]
    assert plan["schedule"] == {"kind": "custom", "weights": [1.0, 2.0, 1.0, 4.0]}
    assert plan["rounds"] == 4
    assert plan["schedules"][-1]["shares"] == pytest.approx([0.125, 0.25, 0.125, 0.5], rel=1e-12)
    first, second, third, last = plan["noise_multipliers"]
    assert first == third == pytest.approx(second * math.sqrt(2)) == pytest.approx(last * 2)
    page = dpagent("plan", "--custom", "1,2,1,4").stdout
    assert re.search(r"^custom \* ", page, flags=re.MULTILINE)


def test_custom_weights_stand_beside_the_schedule_that_is_named() -> None:
    plan = plan_json("--custom", "1,2,4", "--schedule", "linear")
    assert plan["schedule"]["kind"] == "linear"
    assert len(plan["schedules"]) == 4


@pytest.mark.parametrize("text", ["1\n2\n5\n", "1, 2,\n5", "\n1 2 5"])
def test_custom_weights_from_a_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "weights.txt").write_text(text)
    plan = plan_json("--custom", str(tmp_path / "weights.txt"))
    assert plan["schedule"]["weights"] == [1.0, 2.0, 5.0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"1\ntwo\n", "weights.txt:2: expected numbers, got 'two'"),
        (b"\n\n", "the file has none"),
        (b"\xff\xfe", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_custom_files_with_errors_are_configuration_errors(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "weights.txt"
    if content is not None:
        file.write_bytes(content)
    error = refusal("--custom", str(file))
    assert error.exit_code == 3
    assert words in str(error)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--custom", "1,-2"], "weight is -2.0"),
        (["--custom", "1,nan"], "weight is nan"),
        (["--custom", "1,0"], "weight is 0.0"),
        (["--custom", "1,1e7"], "expected a ratio of at most"),
        (["--custom", "1,2,3", "--rounds", "4"], "rounds is 4; expected 3"),
    ],
)
def test_custom_weights_out_of_range_are_named(arguments: list[str], words: str) -> None:
    error = refusal(*arguments)
    assert error.exit_code == 9
    assert words in str(error)


def write_fleet(directory: Path, **changes: Any) -> Path:
    settings = {
        "fleet": "test", "devices": 7, "records_per_device": 250, "rounds": 12,
        "privacy": {"epsilon": 1.25, "delta": 1e-6, "sampling_rate": 0.2, "local_steps": 2,
                    "schedule": {"kind": "linear", "ratio": 5}},
        "model": {"name": "digits"}, "cap": {"kind": "none"},
    } | changes  # fmt: skip
    file = directory / "fleet.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file


def test_config_is_what_the_coordinator_would_run(tmp_path: Path) -> None:
    file = write_fleet(tmp_path)
    plan = plan_json("--config", str(file))
    made = new_job(load_fleet_settings(file))
    assert plan["noise_multipliers"] == list(made.noise.multipliers)
    assert plan["epsilon"] == list(made.epsilon_by_round)
    assert plan["schedule"] == {"kind": "linear", "ratio": 5}
    assert (plan["epsilon_target"], plan["delta"], plan["sampling_rate"]) == (1.25, 1e-6, 0.2)
    assert (plan["local_steps"], plan["rounds"]) == (2, 12)
    fleet = plan["fleet"]
    assert (fleet["devices"], fleet["records_per_device"], fleet["expected_lot"]) == (7, 250, 50)
    assert fleet["parameters"] != plan_json("--rounds", "1")["fleet"]["parameters"]
    page = dpagent("plan", "--config", str(file)).stdout
    assert re.search(r"^none \*", page, flags=re.MULTILINE)
    assert re.search(r"^clamp  ", page, flags=re.MULTILINE)


def test_the_model_of_a_config_may_be_a_file_of_ones_own(tmp_path: Path) -> None:
    model = {"name": "own", "input_shape": [8], "classes": 3, "layers": [{"dense": 3}]}
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "own.yaml").write_text(yaml.safe_dump(model))
    plan = plan_json("--config", str(write_fleet(tmp_path, model={"name": "models/own.yaml"})))
    assert plan["fleet"]["parameters"] == 8 * 3 + 3


def test_options_win_over_the_config(tmp_path: Path) -> None:
    plan = plan_json(
        "--config", str(write_fleet(tmp_path)),
        "--epsilon", "2", "--rounds", "5", "--schedule", "uniform", "--devices", "9",
    )  # fmt: skip
    assert (plan["epsilon_target"], plan["rounds"], plan["delta"]) == (2.0, 5, 1e-6)
    assert plan["schedule"] == {"kind": "uniform"}
    assert (plan["fleet"]["devices"], plan["fleet"]["records_per_device"]) == (9, 250)


def test_config_with_an_error_names_its_line(tmp_path: Path) -> None:
    result = dpagent("plan", "--config", str(write_fleet(tmp_path, colour="green")))
    assert result.returncode == 3
    assert "colour: unknown key" in result.stderr


def test_help_states_the_defaults_in_force() -> None:
    from cli.plan.target import PlanTarget

    text = " ".join(re.sub(r"[│\n]", " ", dpagent("plan", "--help", COLUMNS="200").stdout).split())
    target = PlanTarget()
    for name, shown in (
        ("epsilon", "2"),
        ("delta", "1e-5"),
        ("rounds", "100"),
        ("sampling_rate", "0.1"),
        ("schedule", "incrementing"),
        ("step", "0.3"),
        ("ratio", "3"),
        ("local_steps", "1"),
        ("devices", "100"),
        ("records_per_device", "1000"),
        ("parameters", "26010"),
    ):
        value = getattr(target, name)
        assert value == (type(value))(shown)
        option = text.split(f"--{name.replace('_', '-')} ", 1)[1]
        assert re.match(rf"[^\[]*\[default: \({re.escape(shown)}\b", option), name


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices", "1", "--records-per-device", "10"], "a single step is mostly noise"),
        (["--delta", "1e-3"], "not well below one over a device's records"),
        (["--delta", "0.5"], "δ = 0.5 is not well below one over a device's records"),
        (["--epsilon", "100", "--rounds", "2"], "No device would accept this plan"),
    ],
)
def test_remarks_warn_of_plans_that_disappoint(arguments: list[str], words: str) -> None:
    plan = plan_json(*arguments)
    assert any(words in remark for remark in plan["remarks"])
    assert plan_json("--rounds", "10")["remarks"] == []


@pytest.mark.parametrize(
    ("epsilon", "rounds", "rate"), [(0.1, 400, 1.0), (0.05, 40, 1.0), (2.0, 12, 0.1), (100.0, 2, 0.1)]
)
def test_a_plan_is_said_to_be_refused_exactly_when_a_coordinator_would_refuse_it(
    tmp_path: Path, epsilon: float, rounds: int, rate: float
) -> None:
    privacy = {"epsilon": epsilon, "sampling_rate": rate, "schedule": {"kind": "incrementing"}}
    file = write_fleet(tmp_path, rounds=rounds, privacy=privacy)
    remarks = plan_json("--config", str(file))["remarks"]
    accepted = is_accepted(load_fleet_settings(file))
    assert accepted is (epsilon < 100)
    assert any("accept" in remark for remark in remarks) is not accepted


def is_accepted(settings: FleetSettings) -> bool:
    try:
        Planner(settings, settings.model.spec(), new_job(settings), bytes(32)).require_acceptable()
    except PlanError:
        return False
    return True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epsilon", "0"], "got 0.0"),
        (["--epsilon", "nan"], "got nan"),
        (["--epsilon", "inf"], "got inf"),
        (["--delta", "2"], "got 2.0"),
        (["--delta", "0"], "got 0.0"),
        (["--rounds", "0"], "got 0"),
        (["--rounds", "5001"], "got 5001"),
        (["--sampling-rate", "1.01"], "got 1.01"),
        (["--sampling-rate", "0"], "got 0.0"),
        (["--step", "1"], "got 1.0"),
        (["--ratio", "0.5", "--schedule", "linear"], "got 0.5"),
        (["--local-steps", "0"], "got 0"),
        (["--devices", "0"], "got 0"),
        (["--devices", "1000001"], "got 1000001"),
        (["--records-per-device", "-1"], "got -1.0"),
        (["--records-per-device", "nan"], "got nan"),
        (["--parameters", "0"], "got 0"),
        (["--parameters", "1000000000"], "got 1000000000"),
        (["--custom", "1," * 5001], "5001"),
    ],
)
def test_an_option_out_of_range_is_named_as_it_is_written(arguments: list[str], words: str) -> None:
    error = refusal(*arguments)
    assert isinstance(error, ParameterError)
    assert error.exit_code == 9
    assert f"`{arguments[0]}`" in str(error)
    assert words in str(error)


def test_a_refusal_is_a_sentence_and_an_exit_code() -> None:
    result = dpagent("plan", "--epsilon", "-1")
    assert (result.returncode, result.stdout) == (9, "")
    assert result.stderr == "dpagent: `--epsilon`: got -1.0; expected a number of at least 1e-06.\n"


def test_version_and_help() -> None:
    from dpagent import __version__

    assert dpagent("--version").stdout.strip() == f"dpagent {__version__}"
    for command in ([], ["run"], ["demo"], ["plan"], ["coordinator", "run"], ["budget", "verify"]):
        result = dpagent(*command, "--help")
        assert result.returncode == 0
        assert "Usage" in result.stdout


def test_unknown_option_is_a_usage_error() -> None:
    result = dpagent("plan", "--epsilom", "2")
    assert result.returncode == 2
    assert "epsilom" in result.stderr
