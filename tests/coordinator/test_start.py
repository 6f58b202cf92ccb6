"""How a coordinator begins a job, takes one up again, or refuses to, before it connects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleets import fleet_values, write_fleet

from coordinator.daemon import Coordinator
from coordinator.keys import load_opener, load_signer
from coordinator.reader import StoreReader
from coordinator.settings import FleetSettings, load_fleet_settings
from dpagent.errors import ConfigurationError, DataError, DpagentError, PlanError, StateInUseError
from dpagent.transport.session import MqttSession
from dpagent.transport.settings import MqttSettings


def settings_of(directory: Path, **changes: Any) -> FleetSettings:
    return load_fleet_settings(write_fleet(directory, None, **changes))


def make_and_free(settings: FleetSettings) -> None:
    """Begin or take up a job, and let go of its directory without running it."""
    Coordinator(settings).close()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"privacy": {"epsilon": 5.0}}, "privacy.epsilon was 4.0 and is 5.0"),
        ({"privacy": {"schedule": {"kind": "linear"}}},
         "privacy.schedule.kind was 'uniform' and is 'linear'"),
        ({"rounds": 3}, "rounds was 2 and is 3"),
        ({"fleet": "renamed"}, "fleet was 'testers' and is 'renamed'"),
        ({"model": {"seed": 7}}, "model.seed was 0 and is 7"), ({"cap": {"kind": "none"}}, "cap.kind was"),
        ({"optimiser": {"momentum": 0.5}}, "optimiser.momentum was 0.9 and is 0.5"),
        ({"fragments_per_update": 6}, "fragments_per_update was 5 and is 6"),
        ({"records_per_device": 51}, "records_per_device was 50.0 and is 51.0"),
    ],
)  # fmt: skip
def test_changed_settings_are_refused_with_the_key_named(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    make_and_free(settings_of(tmp_path))
    with pytest.raises(ConfigurationError) as caught:
        Coordinator(settings_of(tmp_path, **changes))
    assert sentence in str(caught.value).replace("`", "")
    make_and_free(settings_of(tmp_path))  # free again, and unchanged


def test_what_does_not_define_the_job_may_change(tmp_path: Path) -> None:
    make_and_free(settings_of(tmp_path))
    make_and_free(
        settings_of(tmp_path, devices=9, round={"deadline_s": 99}, mqtt={"url": "mqtt://elsewhere"})
    )


def test_the_coordinators_session_is_its_own_at_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker lets any user take over a session whose id it knows, and with it the messages that wait."""
    ids: list[str] = []
    begun = MqttSession.__init__

    def noted(self: MqttSession, *args: Any, client_id: str, **others: Any) -> None:
        ids.append(client_id)
        begun(self, *args, client_id=client_id, **others)

    monkeypatch.setattr(MqttSession, "__init__", noted)
    for directory in ("one", "one", "other"):
        (tmp_path / directory).mkdir(exist_ok=True)
        make_and_free(settings_of(tmp_path / directory))
    first, again, other = ids
    assert first == again
    assert first != other
    assert all(each.startswith("dpagent-coordinator-testers-") for each in ids)


def test_a_restart_keeps_job_and_keys(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    make_and_free(settings)
    key, sealing = load_signer(settings.keys_dir, "testers"), load_opener(settings.keys_dir, "testers")
    reader = StoreReader(settings.state_dir)
    job = reader.job()
    make_and_free(settings)
    assert job is not None
    assert reader.job() == job
    reader.close()
    assert load_signer(settings.keys_dir, "testers").public_key == key.public_key
    assert load_opener(settings.keys_dir, "testers").public_key == sealing.public_key
    assert settings.keys_dir == tmp_path / "keys"
    for name in ("signing.key", "sealing.key"):
        assert (settings.keys_dir / name).stat().st_mode & 0o777 == 0o600


def test_a_new_job_in_another_state_keeps_the_keys(tmp_path: Path) -> None:
    first, second = settings_of(tmp_path), settings_of(tmp_path, state_dir="next", rounds=3)
    make_and_free(first)
    keys = {file.name: file.read_bytes() for file in first.keys_dir.iterdir()}
    with pytest.raises(ConfigurationError, match="coordinator job add FILE"):
        Coordinator(settings_of(tmp_path, rounds=3))
    make_and_free(second)
    assert {file.name: file.read_bytes() for file in second.keys_dir.iterdir()} == keys
    assert not list(second.state_dir.glob("*.key"))


@pytest.mark.parametrize("name", ["signing.key", "sealing.key"])
@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_damaged_key_is_a_sentence(tmp_path: Path, name: str, content: bytes) -> None:
    settings = settings_of(tmp_path)
    make_and_free(settings)
    (settings.keys_dir / name).write_bytes(content)
    with pytest.raises(DpagentError, match=name):
        Coordinator(settings)


def test_two_coordinators_cannot_share_a_state(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    coordinator = Coordinator(settings)
    with pytest.raises(StateInUseError):
        Coordinator(settings)
    coordinator.close()


@pytest.mark.parametrize(
    "changes",
    [{"records_per_device": 1e9, "privacy": {"sampling_rate": 1.0}},
     {"fragments_per_update": 1, "model": {"name": "sensor-cnn"}, "records_per_device": 1e5},
     {"privacy": {"epsilon": 1e-6, "delta": 1e-12}},
     {"privacy": {"epsilon": 100.0, "delta": 1e-5}}],
    ids=["lot", "fragment", "no epsilon", "sampler"],
)  # fmt: skip
def test_a_plan_that_no_device_would_accept_fails_at_the_coordinator(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(PlanError):
        Coordinator(settings_of(tmp_path, **changes))
    make_and_free(settings_of(tmp_path))  # nothing was begun, and nothing is held


def test_a_job_whose_later_rounds_do_not_fit_a_message_is_refused_before_it_begins(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "fragments_per_update": 2, "model": {"name": "sensor-cnn"}, "records_per_device": 116_000,
        "rounds": 50,
        "privacy": {
            "epsilon": 6.8, "delta": 1e-5, "sampling_rate": 0.1, "schedule": {"kind": "incrementing"},
        },
    }  # fmt: skip
    with pytest.raises(PlanError, match="fragments_per_update is 2; expected at least 3"):
        Coordinator(settings_of(tmp_path, **changes))
    reader = StoreReader(tmp_path / "state")
    assert reader.jobs() == []
    reader.close()
    make_and_free(settings_of(tmp_path, **changes | {"fragments_per_update": 3}))


def test_a_missing_password_leaves_the_state_free(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    missing = MqttSettings(username="u", password_file=tmp_path / "none")
    with pytest.raises(ConfigurationError) as caught:
        Coordinator(settings.with_values({"mqtt": missing}))
    assert "password_file" in str(caught.value)
    # The error is still in hand, as it is for a caller who shows it and tries again.
    make_and_free(settings)


def test_a_damaged_database_is_a_sentence(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    make_and_free(settings)
    database = settings.state_dir / "coordinator.db"
    content = bytearray(database.read_bytes())
    content[4_096:] = b"\xaa" * (len(content) - 4_096)
    database.write_bytes(content)
    with pytest.raises(DpagentError, match=r"coordinator\.db"):
        Coordinator(settings)


def test_the_example_of_a_fleet_is_valid() -> None:
    assert FleetSettings.checked(fleet_values(None)).rounds == 2


@pytest.mark.parametrize(("delta", "is_told"), [(1e-4, False), (0.01, True), (0.5, True)])
def test_a_delta_that_guarantees_little_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, delta: float, is_told: bool
) -> None:
    file = write_fleet(
        tmp_path, None, privacy={"delta": delta}, mqtt={"url": "mqtt://127.0.0.1:1"},
        test_data={"path": "missing.npz"},
    )  # fmt: skip
    with pytest.raises(DataError, match=r"missing\.npz"):
        Coordinator(load_fleet_settings(file))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [sentence.startswith(f"δ = {delta:g} ") for sentence in told] == [True] * is_told
