"""Variables and options over a file: the same settings as in one file, and errors that name them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleets import agent_values, fleet_values
from hypothesis import given
from hypothesis import strategies as st

from agent.profile import Profile
from agent.settings import AgentSettings, load_agent_settings
from coordinator.settings import FleetSettings, load_fleet_settings
from dpagent.configuration import load_settings
from dpagent.errors import ConfigurationError, UsageError
from dpagent.former_keys import FORMER_KEYS
from dpagent.overrides import keys_of, overridden, overrides_of, variable_of
from dpagent.protocol.signing import Signer
from dpagent.schema.base import Schema
from mixer.settings import MixerSettings

KEY = Signer(bytes(range(32)), "testers").public_key
SCHEMAS: list[type[Schema]] = [AgentSettings, FleetSettings, MixerSettings]


def agent_file(directory: Path, **changes: Any) -> Path:
    file = directory / "agent.yaml"
    file.write_text(yaml.safe_dump(agent_values(None, KEY, **changes), sort_keys=False))
    return file


def refused(file: Path, environment: Mapping[str, str], *options: str) -> list[str]:
    """The lines of the error, without the file's directory."""
    with pytest.raises(ConfigurationError) as caught:
        load_agent_settings(file, overrides_of(environment, options))
    return str(caught.value).replace(f"{file.parent}/", "").splitlines()


# --- layers ---

_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(
    lambda text: bool(text.strip()) and text != "null"
)
_MAYBE = st.none() | st.floats(0.1, 100)
_SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "mqtt.keepalive_s": st.integers(5, 3600),
    "mqtt.username": _NAMES,
    "mqtt.protocol": st.sampled_from(["auto", "5", "3.1.1"]),
    "budget.epsilon": st.floats(0.1, 1000) | st.integers(1, 1000),
    "limits.methods": st.lists(st.sampled_from(["dp-sgd", "ldp-fl", "central"]), min_size=1, unique=True),
    "limits.dummy_traffic": st.booleans(),
    "limits.maximum_job_epsilon": _MAYBE,
    "model.command": st.lists(_NAMES),
    "data.csv.offset": st.floats(-9, 9) | st.dictionaries(st.sampled_from(["ax", "ay"]), st.floats(-9, 9)),
    "data.classes": st.integers(2, 9) | st.just(["cat", "dog"]),
}
_LAYERS = st.fixed_dictionaries(
    {}, optional={key: st.tuples(*[st.none() | st.tuples(values)] * 3) for key, values in _SETTINGS.items()}
)


def _written(value: Any) -> str:
    """A value as a variable or an option has it: texts as they are, all else as YAML."""
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True)


def _with(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The values with one key set, in the plainest way."""
    first, _, rest = key.partition(".")
    below = values.get(first)
    if rest:
        return {**values, first: _with(below or {}, rest, value)}
    both_maps = isinstance(below, dict) and isinstance(value, dict)
    return {**values, first: {**below, **value} if both_maps else value}


@given(_LAYERS)
def test_layers_are_one_file_in_which_the_strongest_stands(layers: dict[str, Any]) -> None:
    base = agent_values(None, KEY)
    in_file, merged, environment, options = dict(base), dict(base), {}, []
    strongest = {}
    for key, (file_value, variable, option) in layers.items():
        if file_value is not None:
            in_file, merged = (_with(values, key, file_value[0]) for values in (in_file, merged))
        if variable is not None:
            environment[variable_of(key.split("."))] = _written(variable[0])
            merged, strongest[key] = _with(merged, key, variable[0]), variable_of(key.split("."))
        if option is not None:
            options.append(f"{key}={_written(option[0])}")
            merged, strongest[key] = _with(merged, key, option[0]), f"--set {key}"
    with tempfile.TemporaryDirectory() as directory:
        one, layered = Path(directory) / "one.yaml", Path(directory) / "layered.yaml"
        one.write_text(yaml.safe_dump(merged, sort_keys=False))
        layered.write_text(yaml.safe_dump(in_file, sort_keys=False))
        overrides = overrides_of(environment, options)
        settings = load_agent_settings(layered, overrides)
        assert settings == load_agent_settings(one)
        assert settings.limits.given == load_agent_settings(one).limits.given
    sources = overridden(AgentSettings, in_file, overrides).sources
    for key, source in strongest.items():
        place = tuple(key.split("."))
        if not isinstance(merged_value := _at(merged, place), dict) or not merged_value:
            assert sources[place] == source


def _at(values: Any, place: tuple[str, ...]) -> Any:
    for part in place:
        values = values[part]
    return values


@given(
    st.sampled_from([(schema, key) for schema in (AgentSettings, FleetSettings) for key in keys_of(schema)]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"))
    | st.sampled_from(
        ["{}", "[]", "null", "{a: 1}", "-1", "1e999", "{epsilon: x}", "&a [*a]", "? [a]\n: b", "5: 3"]
    ),
)
def test_whatever_an_override_says_is_taken_or_refused_by_its_name(
    place: tuple[type[Schema], tuple[str, ...]], text: str
) -> None:
    schema, key = place
    variable = variable_of(key)
    with tempfile.TemporaryDirectory() as directory:
        if schema is AgentSettings:
            file, load = agent_file(Path(directory)), load_agent_settings
        else:
            file, load = Path(directory) / "fleet.yaml", load_fleet_settings  # type: ignore[assignment]
            file.write_text(yaml.safe_dump(fleet_values(None), sort_keys=False))
        try:
            load(file, overrides_of({variable: text}))
        except ConfigurationError as error:
            for line in str(error).splitlines():
                assert variable in line, line


@pytest.mark.parametrize("schema", SCHEMAS)
def test_each_key_has_one_variable_and_each_variable_one_key(schema: type[Schema]) -> None:
    keys = list(keys_of(schema))
    variables = [variable_of(key) for key in keys]
    assert len(set(variables)) == len(keys) > 10
    assert "DPAGENT_CONFIG" not in variables, "it names the file"
    read = {each.source: each.key for each in overrides_of(dict.fromkeys(variables, "x"))}
    assert [read[variable] for variable in variables] == keys


def test_what_is_in_a_section_is_stronger_than_the_section(tmp_path: Path) -> None:
    environment = {"DPAGENT_MQTT__URL": "mqtt://b", "DPAGENT_MQTT": "{url: mqtt://a, keepalive_s: 9}"}
    settings = load_agent_settings(agent_file(tmp_path), overrides_of(environment))
    assert (settings.mqtt.url, settings.mqtt.keepalive_s) == ("mqtt://b", 9)


def test_of_two_options_the_last_counts(tmp_path: Path) -> None:
    overrides = overrides_of({}, ["mqtt.keepalive_s=9", "mqtt.keepalive_s=11"])
    assert load_agent_settings(agent_file(tmp_path), overrides).mqtt.keepalive_s == 11


def test_texts_are_taken_as_they_are_and_null_unsets(tmp_path: Path) -> None:
    file = agent_file(tmp_path, mqtt={"url": "mqtt://a", "username": "u", "password_file": "p"})
    overrides = overrides_of({"DPAGENT_MQTT__PASSWORD_FILE": "null", "DPAGENT_MQTT__USERNAME": "1e5: 'x' #1"})
    settings = load_agent_settings(file, overrides)
    assert (settings.mqtt.username, settings.mqtt.password_file) == ("1e5: 'x' #1", None)


def test_paths_are_seen_from_the_file_wherever_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = agent_file(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    overrides = overrides_of({"DPAGENT_STATE_DIR": "books"}, ["ledger.second_head=head"])
    files = load_agent_settings(file, overrides).ledger_files
    assert (files.state_dir, files.second_head) == (tmp_path / "books", tmp_path / "head")


# --- what is wrong ---


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("DPAGENT_MQTT_URL", "DPAGENT_MQTT__URL"),
        ("DPAGENT_mqtt__url", "DPAGENT_MQTT__URL"),
        ("DPAGENT_MQTT__PASSWORD", "DPAGENT_MQTT__PASSWORD_FILE"),
        ("DPAGENT_LIMITS__METHOD", "DPAGENT_LIMITS__METHODS"),
        ("DPAGENT_LIMITS__MECHANISMS", "limits.methods"),
        ("DPAGENT_FLEETS", "DPAGENT_FLEET"),
        ("DPAGENT_FLEET__NAME", "DPAGENT_FLEET"),
        ("DPAGENT_COLOUR", "dpagent config schema"),
        ("DPAGENT_COORDINATOR_PORT_1883_TCP_ADDR", "enableServiceLinks"),
        ("DPAGENT_", "dpagent config schema"),
    ],
)
def test_an_unknown_variable_says_what_may_be_meant_and_not_its_value(
    tmp_path: Path, variable: str, meant: str
) -> None:
    (line,) = refused(agent_file(tmp_path), {variable: "geheim"})
    assert line.startswith(f"{variable}: unknown key.")
    assert meant in line
    assert "geheim" not in line


def test_an_unknown_option_says_what_may_be_meant(tmp_path: Path) -> None:
    (line,) = refused(agent_file(tmp_path), {}, "mqtt.ulr=mqtt://b")
    assert line == "--set mqtt.ulr: unknown key. Did you mean --set mqtt.url?"


@pytest.mark.parametrize("option", ["mqtt.url", "=5", " =5", ""])
def test_an_option_without_key_or_value_is_no_option(option: str) -> None:
    with pytest.raises(UsageError, match="expected KEY=VALUE"):
        overrides_of({}, [option])


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("KEEPALIVE_S", "1", ": mqtt.keepalive_s: got 1; expected a number of at least 5."),
        ("KEEPALIVE_S", "soon", ": mqtt.keepalive_s: got 'soon'; expected a whole number."),
        ("KEEPALIVE_S", " ", " is empty; expected a value (`null`: none), or nothing of that name."),
        ("KEEPALIVE_S", "[1", ": not valid YAML: expected ',' or ']', but got '<stream end>'."),
        ("KEEPALIVE_S", "\x1b", ": not valid YAML: special characters are not allowed."),
        ("PROTOCOL", "4", ": mqtt.protocol: got '4'; expected 'auto', '5' or '3.1.1'."),
    ],
)
def test_a_wrong_value_names_its_variable(tmp_path: Path, variable: str, text: str, words: str) -> None:
    name = f"DPAGENT_MQTT__{variable}"
    assert refused(agent_file(tmp_path), {name: text}) == [f"{name}{words}"]


def test_an_unknown_key_in_the_value_of_a_section_is_named_without_what_it_says(tmp_path: Path) -> None:
    (line,) = refused(agent_file(tmp_path), {"DPAGENT_MQTT": "{password: geheim}"})
    assert line.startswith("DPAGENT_MQTT: mqtt.password: unknown key. Expected one of: url,")


def test_a_password_in_the_url_is_not_repeated(tmp_path: Path) -> None:
    (line,) = refused(agent_file(tmp_path), {"DPAGENT_MQTT__URL": "mqtt://me:geheim@host"})
    assert "credentials do not belong in the URL" in line
    assert "geheim" not in line


def test_a_list_of_the_file_lends_no_line_to_one_over_it(tmp_path: Path) -> None:
    file = agent_file(tmp_path, limits={"methods": ["dp-sgd"]})
    line, *_ = refused(file, {}, "limits.methods=[3]")
    assert line.startswith("--set limits.methods: limits.methods.0: got 3")


def test_what_does_not_go_together_names_the_file_and_what_stands_over_it(tmp_path: Path) -> None:
    (line,) = refused(agent_file(tmp_path), {"DPAGENT_LIMITS__REQUIRE_MIXER": "true"})
    assert line.partition(": ")[0].endswith(", with DPAGENT_LIMITS__REQUIRE_MIXER")
    (line,) = refused(agent_file(tmp_path), {"DPAGENT_LIMITS__TRUST": "[coordinator]"})
    assert line.startswith("agent.yaml:1, with DPAGENT_LIMITS__TRUST: ")


def test_all_that_is_wrong_is_named_at_once_in_file_and_over_it(tmp_path: Path) -> None:
    file = agent_file(tmp_path, fleet="a/b")
    said = refused(file, {"DPAGENT_COLOUR": "red"}, "mqtt.keepalive_s=0")
    assert [line.split(": ")[0] for line in said] == [
        "DPAGENT_COLOUR", "agent.yaml:1", "--set mqtt.keepalive_s",
    ]  # fmt: skip


def test_a_key_of_another_daemon_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump(fleet_values(None), sort_keys=False))
    with pytest.raises(ConfigurationError, match=r"DPAGENT_BUDGET__EPSILON: unknown key\."):
        load_fleet_settings(file, overrides_of({"DPAGENT_BUDGET__EPSILON": "1"}))


# --- keys that there were ---


@pytest.mark.parametrize(("former", "now"), FORMER_KEYS.items())
def test_a_former_key_names_the_one_that_took_its_place(tmp_path: Path, former: str, now: str) -> None:
    place = tuple(now.split("."))
    schema = next(each for each in (*SCHEMAS, Profile) if place in keys_of(each))
    assert tuple(former.split(".")) not in keys_of(schema)
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump(_with({}, former, 1)))
    with pytest.raises(ConfigurationError) as caught:
        load_settings(file, schema)
    line = len(former.split("."))
    assert f"{file}:{line}: {former}: unknown key. {now} took its place." in str(caught.value).splitlines()


def test_a_former_key_of_another_file_is_just_unknown(tmp_path: Path) -> None:
    (line,) = refused(agent_file(tmp_path, threads=3), {})
    assert "threads: unknown key. Expected one of: fleet," in line
