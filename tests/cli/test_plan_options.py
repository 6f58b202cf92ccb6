"""The input of ``dpagent plan``: custom schedules, a fleet's file, options, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import dpagent
from plans import plan_json, refusal

from coordinator.planning import Planner, new_job
from coordinator.settings import FleetSettings, load_fleet_settings
from dpagent.errors import ExitCode, ParameterError, PlanError

KINDS = ["uniform", "incrementing", "linear"]


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


def test_a_method_without_sums_is_refused() -> None:
    error = refusal("--method", "ldp-fl")
    assert error.exit_code == ExitCode.PLAN
    assert "method is ldp-fl" in str(error)


@pytest.mark.parametrize("option", ["--sampling-rate", "--local-steps"])
def test_options_of_random_lots_are_refused_where_there_are_none(option: str) -> None:
    error = refusal("--method", "central", option, "1")
    assert error.exit_code == ExitCode.PLAN
    assert f"`{option}` is 1" in str(error)


def test_noise_of_devices_is_refused_where_there_is_no_other() -> None:
    error = refusal("--method", "dp-sgd", "--device-noise", "30")
    assert error.exit_code == ExitCode.PLAN
    assert "`--device-noise` is 30" in str(error)


def test_noise_of_devices_is_taken_from_the_fleets_file_for_central_alone(tmp_path: Path) -> None:
    privacy = {"method": "central", "epsilon": 8.0, "device_noise": {"epsilon": 30.0}}
    file = write_fleet(tmp_path, privacy=privacy)
    planned = plan_json("--config", str(file))["device_noise"]
    assert planned["epsilon"][-1] == pytest.approx(30, rel=1e-3)
    assert plan_json("--config", str(file), "--method", "dp-sgd")["device_noise"] is None


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


def test_a_bounded_cap_is_priced_beside_schedules_that_know_no_cap(tmp_path: Path) -> None:
    privacy = {"epsilon": 16.0, "method": "incrementing", "noise": "laplace"}
    page = dpagent(
        "plan", "--config", str(write_fleet(tmp_path, privacy=privacy, cap={"kind": "bounded"}))
    ).stdout
    assert re.search(r"^bounded \*", page, flags=re.MULTILINE)
    assert "priced as if no cap acted" in " ".join(page.split())


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
        ("schedule", "uniform"),
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
    plan = plan_json("--rounds", "10", *arguments)
    assert any(words in remark for remark in plan["remarks"])


def test_a_plan_that_disappoints_in_nothing_has_no_remarks() -> None:
    assert plan_json("--rounds", "10")["remarks"] == []


@pytest.mark.parametrize(
    ("epsilon", "rounds", "rate"), [(0.1, 100, 1.0), (0.05, 40, 1.0), (2.0, 12, 0.1), (100.0, 2, 0.1)]
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
