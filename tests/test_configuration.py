"""Configuration files: every complaint names file, line and key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import yaml
from fleets import agent_values, fleet_values
from pydantic import Field

from agent.profile import load_profile, profile_names
from agent.settings import AgentSettings, load_agent_settings
from coordinator.planning import new_job
from coordinator.settings import FleetSettings, changed_terms, load_fleet_settings
from dpagent.configuration import FilePath, Settings, load_settings, resolve
from dpagent.errors import ConfigurationError
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.transport.settings import MqttSettings

KEY = Signer(new_signing_secret(), "testers").public_key


class Oven(Settings):
    degrees: Annotated[float, Field(ge=0, le=300)]
    fan: bool = False


class Pot(Settings):
    kind: Literal["pot"]
    litres: int


class Pan(Settings):
    kind: Literal["pan"]
    width: int


class Kitchen(Settings):
    name: str
    cooks: Annotated[int, Field(ge=1)] = 1
    oven: Oven = Oven(degrees=100)
    dishes: list[Annotated[Pot | Pan, Field(discriminator="kind")]] = Field(default=[])
    pantry: Annotated[FilePath, Field(strict=False)] = Path("pantry")


def read(tmp_path: Path, text: str, schema: type[Settings] = Kitchen) -> Any:
    file = tmp_path / "kitchen.yaml"
    file.write_text(text, encoding="utf-8")
    return load_settings(file, schema)


def complaints(tmp_path: Path, text: str, schema: type[Settings] = Kitchen) -> list[str]:
    """The lines of the error, without the file's directory."""
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, text, schema)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def test_a_good_file_is_read(tmp_path: Path) -> None:
    kitchen = read(
        tmp_path,
        "name: mine\noven:\n  degrees: 180\n  fan: true\n"
        "dishes:\n- kind: pot\n  litres: 3\n- {kind: pan, width: 2}\n",
    )
    assert kitchen == Kitchen(
        name="mine",
        oven=Oven(degrees=180, fan=True),
        dishes=[Pot(kind="pot", litres=3), Pan(kind="pan", width=2)],
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1E2", 100.0), ("1.5e+1", 15.0), ("+2.5", 2.5), (".5", 0.5), ("3", 3.0), ("3.", 3.0)],
)
def test_numbers_are_read_as_people_write_them(tmp_path: Path, text: str, value: float) -> None:
    degrees = read(tmp_path, f"name: mine\noven: {{degrees: {text}}}\n").oven.degrees
    assert isinstance(degrees, float)
    assert degrees == value


@pytest.mark.parametrize("text", [".nan", ".inf", "-.inf", "1e999"])
def test_numbers_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (line,) = complaints(tmp_path, f"name: mine\noven:\n  degrees: {text}\n")
    assert line.startswith("kitchen.yaml:3: oven.degrees: got ")


def test_an_unknown_key_names_line_key_and_what_is_known(tmp_path: Path) -> None:
    assert complaints(tmp_path, "name: mine\n\ncook: 2\n") == [
        "kitchen.yaml:3: cook: unknown key. Expected one of: name, cooks, oven, dishes, pantry."
    ]


def test_an_unknown_key_in_a_section_names_what_that_section_knows(tmp_path: Path) -> None:
    assert complaints(tmp_path, "name: mine\noven:\n  degrees: 1\n  # comment\n  fam: true\n") == [
        "kitchen.yaml:5: oven.fam: unknown key. Expected one of: degrees, fan."
    ]


def test_an_unknown_key_in_a_list_points_at_its_line(tmp_path: Path) -> None:
    text = "name: mine\ndishes:\n- kind: pot\n  litres: 3\n- kind: pan\n  width: 1\n  lid: true\n"
    (line,) = complaints(tmp_path, text)
    assert line.startswith("kitchen.yaml:7: dishes.1.lid: unknown key.")


def test_an_unknown_tag_and_a_wrong_value_in_a_union_point_at_their_lines(tmp_path: Path) -> None:
    lines = complaints(tmp_path, "name: mine\ndishes:\n- kind: pot\n  litres: many\n- kind: wok\n")
    assert re.findall(r"^kitchen.yaml:(\d): dishes\.([01])", "\n".join(lines), flags=re.MULTILINE) == [
        ("4", "0"),
        ("5", "1"),
    ]


def test_a_missing_key_is_named_with_the_line_of_its_section(tmp_path: Path) -> None:
    assert complaints(tmp_path, "cooks: 2\noven:\n  fan: true\n") == [
        "kitchen.yaml:1: name: this key is missing.",
        "kitchen.yaml:2: oven.degrees: this key is missing.",
    ]


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    lines = complaints(tmp_path, "name: 5\ncooks: 0\noven:\n  degrees: 301\nfoo: 1\n")
    assert [line.split(" ")[0:2] for line in lines] == [
        ["kitchen.yaml:1:", "name:"], ["kitchen.yaml:2:", "cooks:"], ["kitchen.yaml:4:", "oven.degrees:"],
        ["kitchen.yaml:5:", "foo:"],
    ]  # fmt: skip


def test_what_came_and_what_was_expected_are_said(tmp_path: Path) -> None:
    assert complaints(tmp_path, "name: mine\ncooks: 0\n") == [
        "kitchen.yaml:2: cooks: got 0; expected greater than or equal to 1."
    ]


@pytest.mark.parametrize(
    ("text", "key"),
    [("name: 5", "name"), ("name: [a]", "name"), ("name: null", "name"), ("name: 2020-01-01", "name"),
     ("name: a\ncooks: many", "cooks"), ("name: a\ncooks: 1.5", "cooks"), ("name: a\ncooks: [1]", "cooks"),
     ("name: a\noven: hot", "oven"), ("name: a\noven: [1]", "oven"), ("name: a\ndishes: 3", "dishes"),
     ("name: a\noven: {degrees: hot}", "oven.degrees")],
)  # fmt: skip
def test_wrong_types_are_refused(tmp_path: Path, text: str, key: str) -> None:
    (line,) = complaints(tmp_path, text + "\n")
    assert re.match(rf"kitchen\.yaml:[12]: {key}: got .*; expected ", line)


@pytest.mark.parametrize(
    "text",
    ["cooks: '5'", "cooks: yes", "cooks: true", "oven: {degrees: '100'}", "oven: {degrees: true}",
     "oven: {degrees: 1, fan: 1}", "oven: {degrees: 1, fan: 'on'}"],
)  # fmt: skip
def test_loose_types_are_errors_as_the_base_class_promises(tmp_path: Path, text: str) -> None:
    (line,) = complaints(tmp_path, f"name: mine\n{text}\n")
    assert line.startswith("kitchen.yaml:2: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: a\ncooks: 1\nname: b\n", "kitchen.yaml:3: name: duplicate key."),
        (
            "name: a\noven:\n  degrees: 1\n  degrees: 2\n",
            "kitchen.yaml:4: oven.degrees: duplicate key.",
        ),
        ("name: a\noven: {degrees: 1}\noven: {degrees: 1}\n", "kitchen.yaml:3: oven: duplicate key."),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in complaints(tmp_path, text)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "# only a comment\n", "- a\n- b\n", "just text\n", "5\n", "---\n", "null\n"]
)
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    assert complaints(tmp_path, text) == ["kitchen.yaml:1: expected keys and values, such as `name: …`."]


@pytest.mark.parametrize(
    ("text", "line"),
    [("name: a\n\toven: 1\n", 2), ("name: a\noven: {degrees: 1\n", 3), ("name: 'a\n", 2), ("name: a: b\n", 1),
     ("name: *a\n", 1), ("name: !!python/object:os.system x\n", 1), ("name: a\n---\nname: b\n", 2),
     ("? [a]\n: b\n", 1)],
)  # fmt: skip
def test_what_is_not_yaml_is_refused_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    first, *_ = complaints(tmp_path, text)
    assert first.startswith(f"kitchen.yaml:{line}: not valid YAML: ")


@pytest.mark.parametrize("text", ["name: a\0b\n", "name: 2020-13-45\n", "name: \x07\n"])
def test_odd_characters_and_dates_are_refused(tmp_path: Path, text: str) -> None:
    assert "not valid YAML" in complaints(tmp_path, text)[0]


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    """Thirty lines that would be 3³⁰ values."""
    lines = ["a0: &a0 [1, 1, 1]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 30))]
    assert "aliases expand to too many values" in complaints(tmp_path, "\n".join(lines))[0]


@pytest.mark.parametrize("text", ["&a {name: *a}\n", "name: a\noven: &o\n  degrees: *o\n", "name: &n [*n]\n"])
def test_a_value_that_contains_itself_is_refused(tmp_path: Path, text: str) -> None:
    assert complaints(tmp_path, text)


def test_keys_that_are_no_text_are_refused(tmp_path: Path) -> None:
    assert complaints(tmp_path, "name: a\n5: b\n")[0].startswith("kitchen.yaml:")


def test_merged_keys_are_read_and_complaints_still_have_a_line(tmp_path: Path) -> None:
    assert re.match(
        r"kitchen\.yaml:\d: ", complaints(tmp_path, "oven: &o\n  degrees: 1\n<<: *o\nname: a\n")[0]
    )


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"missing\.yaml: No such file.*Give the path of a YAML file"
    ):
        load_settings(tmp_path / "missing.yaml", Kitchen)
    with pytest.raises(ConfigurationError, match="Is a directory"):
        load_settings(tmp_path, Kitchen)


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kitchen.yaml"
    file.write_bytes("name: Küche\n".encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"kitchen\.yaml is not UTF-8 text \(.* at byte 7\)"):
        load_settings(file, Kitchen)


@pytest.mark.parametrize("text", ["''", "' '", ".", "null", "[a]"])
def test_a_path_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    assert complaints(tmp_path, f"name: a\npantry: {text}\n")[0].startswith("kitchen.yaml:2: pantry: got ")


def test_paths_are_seen_from_the_file(tmp_path: Path) -> None:
    assert resolve(Path("a/b"), tmp_path / "x.yaml") == tmp_path / "a/b"
    assert resolve(Path("/a/b"), tmp_path / "x.yaml") == Path("/a/b")


# --- agent.yaml ---------------------------------------------------------------------------------


def agent_file(tmp_path: Path, **changes: Any) -> Path:
    file = tmp_path / "agent.yaml"
    file.write_text(yaml.safe_dump(agent_values(None, KEY, **changes), sort_keys=False))
    return file


def problem(file: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        (load_agent_settings if file.name == "agent.yaml" else load_fleet_settings)(file)
    return str(caught.value)


def test_an_agent_file_is_read_with_paths_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("pw\n")
    mqtt = {
        "url": "mqtts://broker.example",
        "username": "u",
        "password_file": "password",
        "ca_file": "/ca.pem",
    }
    settings = load_agent_settings(agent_file(tmp_path, mqtt=mqtt))
    assert settings.state_dir == tmp_path / "state"
    assert settings.data.path == tmp_path / "data.npz"
    assert settings.mqtt.password_file == tmp_path / "password"
    assert settings.mqtt.ca_file == Path("/ca.pem")
    assert (settings.mqtt.host, settings.mqtt.port, settings.mqtt.tls) == ("broker.example", 8883, True)
    assert settings.mqtt.password() == "pw"


def test_a_profile_of_ones_own_is_relative_to_the_agent_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "board.yaml").write_text("description: mine\nmemory_mib: 64\nmicrobatch: 2\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    settings = load_agent_settings(agent_file(tmp_path, profile="board.yaml"))
    assert load_profile(settings.profile).microbatch == 2


def test_the_shortest_agent_file_has_defaults(tmp_path: Path) -> None:
    values = agent_values(None, KEY)
    for key in ("state_dir", "limits"):
        del values[key]
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(values))
    settings = load_agent_settings(tmp_path / "agent.yaml")
    assert settings.state_dir == tmp_path / "state"
    assert settings.mqtt == MqttSettings()
    assert settings.limits.messages_per_second == 10


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"coordinator_key": "abc"}, "coordinator_key", "base64"),
        ({"coordinator_key": KEY[:-4]}, "coordinator_key", "base64"),
        ({"coordinator_key": "AAAA"}, "coordinator_key", "32 bytes"),
        ({"fleet": "a/b"}, "fleet", "pattern"),
        ({"fleet": ""}, "fleet", "pattern"),
        ({"mqtt": {"url": "mqtt://u:p@host"}}, "mqtt.url", "credentials do not belong in the URL"),
        ({"mqtt": {"url": "http://host"}}, "mqtt.url", "mqtt://host"),
        ({"mqtt": {"url": "mqtt://"}}, "mqtt.url", "mqtt://host"),
        ({"mqtt": {"url": "host:1883"}}, "mqtt.url", "mqtt://host"),
        ({"mqtt": {"url": "mqtt://host:99999"}}, "mqtt.url", "Port"),
        ({"mqtt": {"url": "mqtt://host:x"}}, "mqtt.url", "Port"),
        ({"mqtt": {"url": "mqtt://host/path"}}, "mqtt.url", "without a path"),
        ({"mqtt": {"protocol": "4"}}, "mqtt.protocol", "'auto', '5' or '3.1.1'"),
        ({"mqtt": {"keepalive_s": 1}}, "mqtt.keepalive_s", "greater than or equal to 5"),
        ({"budget": {"epsilon": 0}}, "budget.epsilon", "greater than 0"),
        ({"budget": {"delta": 1}}, "budget.delta", "less than 1"),
        ({"data": {"kind": "tar"}}, "data.kind", "'images' or 'csv'"),
        ({"data": {"name": ""}}, "data.name", "at least 1 character"),
        ({"limits": {"messages_per_second": 0}}, "limits.messages_per_second", "greater than 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_an_agent_file_is_named(
    tmp_path: Path, changes: dict[str, Any], key: str, words: str
) -> None:
    file = agent_file(tmp_path, **changes)
    text = problem(file)
    line = next(
        n for n, row in enumerate(file.read_text().splitlines(), 1) if f"{key.split('.')[-1]}:" in row
    )
    if key == "data.name":
        line = file.read_text().splitlines().index("  name: ''") + 1
    assert text.startswith(f"{file}:{line}: {key}: ")
    assert words in text
    assert "\n" not in text


def test_a_budget_cannot_be_left_out(tmp_path: Path) -> None:
    values = agent_values(None, KEY)
    del values["budget"]
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(values))
    assert problem(tmp_path / "agent.yaml").endswith("agent.yaml:1: budget: this key is missing.")


# --- fleet.yaml ---------------------------------------------------------------------------------


def fleet_file(tmp_path: Path, **changes: Any) -> Path:
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump(fleet_values(None, **changes), sort_keys=False))
    return file


def test_a_fleet_file_is_read_with_paths_relative_to_it(tmp_path: Path) -> None:
    settings = load_fleet_settings(fleet_file(tmp_path, test_data={"path": "test.npz"}))
    assert settings.state_dir == tmp_path / "state"
    assert settings.test_data is not None
    assert settings.test_data.path == tmp_path / "test.npz"


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"model": {"name": "resnet"}}, "model", "digits, mnist-cnn"),
        ({"round": {"deadline_s": 0.9}}, "round", "expected more than compute_slot_s + jitter_window_s"),
        ({"round": {"minimum_devices": 3}}, "", "expected at most devices = 2"),
        ({"round": {"minimum_devices": 0}}, "round.minimum_devices", "greater than or equal to 1"),
        ({"devices": 0}, "devices", "greater than or equal to 1"),
        ({"rounds": 5_001}, "rounds", "less than or equal to 5000"),
        ({"records_per_device": 0}, "records_per_device", "greater than 0"),
        ({"privacy": {"epsilon": -1}}, "privacy.epsilon", "greater than 0"),
        ({"privacy": {"sampling_rate": 1.5}}, "privacy.sampling_rate", "less than or equal to 1"),
        ({"privacy": {"schedule": {"kind": "steep"}}}, "privacy.schedule.kind", "'uniform'"),
        ({"privacy": {"schedule": {"step": 1.0}}}, "privacy.schedule.step", "less than or equal to 0.99"),
        ({"privacy": {"schedule": {"kind": "custom"}}}, "privacy.schedule",
         "number of schedule weights is 0"),
        ({"privacy": {"schedule": {"kind": "custom", "weights": [1, -1]}}}, "privacy.schedule",
         "schedule weight is -1"),
        ({"privacy": {"schedule": {"kind": "custom", "weights": [1, "2"]}}},
         "privacy.schedule.weights.1", "number"),
        ({"privacy": {"schedule": {"weights": [1, 2]}}}, "privacy.schedule",
         "expected none, or the kind custom"),
        ({"rounds": 3, "privacy": {"schedule": {"kind": "custom", "weights": [1, 2]}}}, "",
         "privacy.schedule.weights has 2 numbers; expected rounds = 3"),
        ({"optimiser": {"momentum": 1.0}}, "optimiser.momentum", "less than 1"),
        ({"cap": {"where": "nowhere"}}, "cap.where", "'coordinator' or 'device'"),
        ({"fragments_per_update": 0}, "fragments_per_update", "greater than or equal to 1"),
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
    terms = FleetSettings.model_validate(fleet_values(None)).job_terms()
    old = json.loads(json.dumps(terms))
    del old["privacy"]["schedule"]["weights"]
    assert changed_terms(old, terms) == ""


@pytest.mark.parametrize("changes", [{"round": {"minimum_devices": 3}}, {"model": {"name": "resnet"}}])
def test_a_problem_of_a_whole_section_does_not_print_the_section(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    # The schema's checks across keys see the whole section: its Python text is not for people.
    text = problem(fleet_file(tmp_path, **changes))
    assert "{" not in text


def test_the_schemas_say_which_keys_exist() -> None:
    assert set(agent_values(None, KEY)) <= set(AgentSettings.model_fields)
    assert set(fleet_values(None)) <= set(FleetSettings.model_fields)


def test_job_terms_leave_out_what_may_change_during_a_job() -> None:
    settings = FleetSettings.model_validate(fleet_values(None))
    later = settings.model_copy(update={"devices": 9, "state_dir": Path("/elsewhere")})
    assert changed_terms(settings.job_terms(), later.job_terms()) == ""
    other = FleetSettings.model_validate(fleet_values(None, privacy={"schedule": {"kind": "linear"}}))
    assert changed_terms(settings.job_terms(), other.job_terms()) == (
        "privacy.schedule.kind was 'uniform' and is 'linear'"
    )


# --- mqtt ---------------------------------------------------------------------------------------


def test_a_password_is_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first\nsecond\n")
    assert MqttSettings(username="u", password_file=file).password() == "first"
    assert MqttSettings().password() is None


@pytest.mark.parametrize("content", [b"", b"\n", b"\nsecond\n", b"\xff\xfe"])
def test_a_password_file_without_a_password_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "password"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=re.escape(f"mqtt.password_file {file}")):
        MqttSettings(username="u", password_file=file).password()


def test_a_password_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        MqttSettings(username="u", password_file=tmp_path / "missing").password()


def test_a_user_without_a_password_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="set both or neither"):
        MqttSettings(username="u").password()


def test_a_password_without_a_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("pw\n")
    with pytest.raises(ConfigurationError, match="set both or neither"):
        MqttSettings(password_file=tmp_path / "password").password()


@pytest.mark.parametrize(
    ("url", "host", "port", "tls"),
    [("mqtt://h", "h", 1883, False), ("mqtts://h/", "h", 8883, True), ("mqtt://[::1]:99", "::1", 99, False)],
)  # fmt: skip
def test_addresses(url: str, host: str, port: int, tls: bool) -> None:
    settings = MqttSettings(url=url)
    assert (settings.host, settings.port, settings.tls) == (host, port, tls)


# --- profiles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_is_valid(name: str) -> None:
    assert load_profile(name).microbatch >= 1


def test_an_unknown_profile_names_those_that_exist() -> None:
    with pytest.raises(ConfigurationError, match="generic-linux"):
        load_profile("toaster")


def test_what_is_too_long_or_too_deep_for_a_configuration_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("[" * 50_000)
    assert "nested too deeply" in problem(file)
    assert "has more than 1,000,000 characters" in problem(Path("/dev/zero"))
