"""``fleet.yaml``: what is read, what is refused, and what may change during a job."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fleets import agent_values, fleet_values

from agent.settings import AgentSettings
from coordinator.database.opening import open_reader
from coordinator.database.settings import PostgresqlAddress
from coordinator.planning import new_job
from coordinator.settings import FleetSettings, load_fleet_settings, require_same_job
from dpagent.configuration import changed_settings
from dpagent.errors import ConfigurationError
from dpagent.protocol.signing import Signer, new_signing_secret

KEY = Signer(new_signing_secret(), "testers").public_key


LAPLACE = {"method": "incrementing", "noise": "laplace"}


def fleet_file(tmp_path: Path, **changes: Any) -> Path:
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump(fleet_values(None, **changes), sort_keys=False))
    return file


def problem(file: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_fleet_settings(file)
    return str(caught.value)


def test_a_fleet_file_is_read_with_paths_relative_to_it(tmp_path: Path) -> None:
    settings = load_fleet_settings(fleet_file(tmp_path, test_data={"path": "test.npz"}))
    assert settings.state_dir == tmp_path / "state"
    assert settings.test_data is not None
    assert settings.test_data.path == tmp_path / "test.npz"


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"model": {"name": "resnet"}}, "model", "digits, mnist-cnn"),
        ({"round": {"deadline_s": 0.9}}, "round", "expected more than 1.00125, when the devices have sent"),
        ({"round": {"minimum_devices": 3}}, "", "expected at most devices = 2"),
        ({"round": {"minimum_devices": 0}}, "round.minimum_devices", "a number of at least 1"),
        ({"devices": 0}, "devices", "a number of at least 1"),
        ({"rounds": 5_001}, "rounds", "a number of at most 5000"),
        ({"records_per_device": 0}, "records_per_device", "a number above 0"),
        ({"privacy": {"epsilon": -1}}, "privacy.epsilon", "a number above 0"),
        ({"privacy": {"sampling_rate": 1.5}}, "privacy.sampling_rate", "a number of at most 1"),
        ({"privacy": {"schedule": {"kind": "steep"}}}, "privacy.schedule.kind", "'uniform'"),
        ({"privacy": {"schedule": {"step": 1.0}}}, "privacy.schedule.step", "a number of at most 0.99"),
        ({"privacy": {"schedule": {"kind": "custom"}}}, "privacy.schedule",
         "number of schedule weights is 0"),
        ({"privacy": {"schedule": {"kind": "custom", "weights": [1, -1]}}}, "privacy.schedule",
         "schedule weight is -1"),
        ({"privacy": {"schedule": {"kind": "custom", "weights": [1, "2"]}}},
         "privacy.schedule.weights.1", "number"),
        ({"privacy": {"schedule": {"weights": [1, 2]}}}, "privacy.schedule",
         "expected none, or the kind custom"),
        ({"privacy": {"schedule": {"kind": None, "step": 0.2, "ratio": 4}}}, "privacy.schedule",
         "step 0.2 (incrementing) and ratio 4 (linear) are both set"),
        ({"rounds": 3, "privacy": {"schedule": {"kind": "custom", "weights": [1, 2]}}}, "",
         "privacy.schedule.weights has 2 numbers; expected rounds = 3"),
        ({"privacy": {"method": "dp-sgd", "noise": "laplace"}}, "privacy", "noise is 'laplace'; expected"),
        ({"privacy": LAPLACE | {"clipping": {"kind": "layers"}}}, "privacy",
         "needs records clipped in L1, and clipping.kind is layers"),
        ({"privacy": LAPLACE | {"clipping": {"kind": "quantile"}}}, "privacy",
         "clipping.kind is quantile, which clips in L2; expected whole"),
        ({"optimiser": {"momentum": 1.0}}, "optimiser.momentum", "a number below 1"),
        ({"cap": {"where": "nowhere"}}, "cap.where", "'coordinator' or 'device'"),
        ({"fragments_per_update": 0}, "fragments_per_update", "a number of at least 1"),
        ({"model": {"name": "scattering", "augmentation": {"views": 2}}}, "model",
         "'scattering' has a front end, whose features are computed once"),
        ({"model": {"augmentation": {"views": 2, "shift": 8}}}, "model", "expected less than the 8 places"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_fleet_file_is_named(
    tmp_path: Path, changes: dict[str, Any], key: str, words: str
) -> None:
    file = fleet_file(tmp_path, **changes)
    text = problem(file)
    assert re.match(rf"{re.escape(str(file))}:\d+: " + (rf"{re.escape(key)}: " if key else ""), text)
    assert words in text


def test_views_of_records_and_a_model_file_with_a_front_end_exclude_each_other(tmp_path: Path) -> None:
    """Known only once the file is found, relative to fleet.yaml."""
    values = {"name": "own", "input_shape": [8, 8, 1], "classes": 10, "layers": [{"dense": 10}]}
    model = {"name": "own.yaml", "augmentation": {"views": 2, "shift": 1}}
    for front_end in ([], [{"random": {"layers": ["tanh"]}}]):
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(values | {"front_end": front_end}))
        settings = load_fleet_settings(fleet_file(tmp_path, model=model)).model
        if front_end:
            with pytest.raises(ConfigurationError, match="model 'own' has a front end"):
                settings.spec()
        else:
            assert settings.spec().name == "own"


def test_a_custom_schedule_gives_each_round_its_share(tmp_path: Path) -> None:
    weights = [1, 2, 5]
    changes = {"rounds": 3, "privacy": {"schedule": {"kind": "custom", "weights": weights}}}
    settings = load_fleet_settings(fleet_file(tmp_path, **changes))
    job = new_job(settings)
    noise = np.array(job.noise.multipliers)
    np.testing.assert_allclose(noise[0] ** 2 / noise**2, weights, rtol=1e-9)
    # A job of an earlier version, whose terms know no weights, goes on.
    terms = FleetSettings.checked(fleet_values(None)).job_terms()
    old = json.loads(json.dumps(terms))
    del old["privacy"]["schedule"]["weights"]
    assert changed_settings(old, terms) == []


@pytest.mark.parametrize("changes", [{"round": {"minimum_devices": 3}}, {"model": {"name": "resnet"}}])
def test_a_problem_of_a_whole_section_does_not_print_the_section(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    # The schema's checks across keys see the whole section: its Python text is not for people.
    text = problem(fleet_file(tmp_path, **changes))
    assert "{" not in text


def test_the_schemas_say_which_keys_exist() -> None:
    assert set(agent_values(None, KEY)) <= set(AgentSettings.names)
    assert set(fleet_values(None)) <= set(FleetSettings.names)


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        ({}, {"kind": "uniform"}, []),
        ({"step": 0.4}, {"kind": "incrementing", "step": 0.4}, []),
        ({"step": 0.3}, {}, ["`privacy.schedule.kind` was 'incrementing' and is 'uniform'"]),
        ({"ratio": 3.0}, {}, ["`privacy.schedule.kind` was 'linear' and is 'uniform'"]),
    ],
)
def test_a_job_keeps_the_kind_of_schedule_that_it_began_with(
    before: dict[str, Any], now: dict[str, Any], changes: list[str]
) -> None:
    """However the keys say it; of some kinds, the values of all keys are the defaults."""
    values = fleet_values(None)
    del values["privacy"]["schedule"]
    terms = [
        FleetSettings.checked(values | {"privacy": values["privacy"] | {"schedule": schedule}}).job_terms()
        for schedule in (before, now)
    ]
    assert [str(each) for each in changed_settings(*terms)] == changes


def test_job_terms_leave_out_what_may_change_during_a_job() -> None:
    settings = FleetSettings.checked(fleet_values(None))
    later = settings.with_values({"devices": 9, "state_dir": Path("/elsewhere")})
    assert changed_settings(settings.job_terms(), later.job_terms()) == []
    other = FleetSettings.checked(fleet_values(None, rounds=7, privacy={"schedule": {"kind": "linear"}}))
    changes = changed_settings(settings.job_terms(), other.job_terms())
    assert [str(each) for each in changes] == [
        "`rounds` was 2 and is 7", "`privacy.schedule.kind` was 'uniform' and is 'linear'",
    ]  # fmt: skip
    with pytest.raises(
        ConfigurationError, match=r"rounds.*privacy\.schedule\.kind.*coordinator job add FILE"
    ):
        require_same_job(settings.job_terms(), other.job_terms(), "first")


def test_a_store_is_sqlite_unless_a_database_is_named(tmp_path: Path) -> None:
    settings = load_fleet_settings(fleet_file(tmp_path))
    assert settings.store_place == tmp_path / "state"
    (tmp_path / "secret").write_text("correct horse\n")
    store = {"url": "postgresql://meadow@db.example/meadow?sslmode=verify-full", "password_file": "secret"}
    place = load_fleet_settings(fleet_file(tmp_path, store=store)).store_place
    assert isinstance(place, PostgresqlAddress)
    assert (place.url, place.password) == (store["url"], "correct horse")
    assert str(place) == "postgresql://meadow@db.example/meadow"
    assert "horse" not in repr(place)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://meadow@db.example/meadow", "expected postgresql://USER@HOST"),
        ("postgresql://meadow@db.example", "with the name of a database"),
        ("postgresql://meadow:horse@db.example/meadow", "a password does not belong in the URL"),
        ("postgresql://db.example/meadow?password=horse", "a password does not belong in the URL"),
        ("postgressql://meadow:horse@db.example/meadow", "a password does not belong in the URL"),
        ("meadow:horse@db.example/meadow", "expected postgresql://USER@HOST"),
        ("postgresql://meadow:hor[horse@db.example/meadow", "expected postgresql://USER@HOST"),
    ],
)
def test_a_database_that_cannot_be_one_is_refused_and_no_password_shown(
    tmp_path: Path, url: str, words: str
) -> None:
    said = problem(fleet_file(tmp_path, store={"url": url}))
    assert words in said
    assert "horse" not in said


def test_a_password_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    store = {"url": "postgresql://meadow@db.example/meadow", "password_file": "nowhere"}
    settings = load_fleet_settings(fleet_file(tmp_path, store=store))
    with pytest.raises(ConfigurationError, match=r"store\.password_file .*nowhere cannot be read"):
        _ = settings.store_place
    (tmp_path / "nowhere").write_text("\n")
    with pytest.raises(ConfigurationError, match="is empty; its first line is the password"):
        _ = settings.store_place


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "coordinator.database.postgresql", raising=False)
    with pytest.raises(ConfigurationError, match=r"PostgreSQL as the coordinator's store needs .*psycopg"):
        open_reader(PostgresqlAddress("postgresql://meadow@db.example/meadow"))
