"""YAML files against a schema: every complaint names file, line, key, value and what was expected."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest

from agent.profile import Profile
from agent.settings import AgentSettings
from coordinator.settings import FleetSettings
from dpagent import yaml_file
from dpagent.configuration import load_settings, resolve
from dpagent.errors import ConfigurationError
from dpagent.schema.base import Schema, fields_of
from dpagent.schema.limits import By, Limits
from dpagent.schema.problems import Fault, SchemaError
from dpagent.settings import FilePath, Settings
from dpagent.yaml_file import read_document
from simulation.request import BrokerRequest, Request


class Oven(Settings):
    degrees: Annotated[float, Limits(ge=0, le=300)]
    fan: bool = False


class Pot(Settings):
    kind: Literal["pot"]
    litres: int


class Pan(Settings):
    kind: Literal["pan"]
    width: int


class Kitchen(Settings):
    name: str
    cooks: Annotated[int, Limits(ge=1)] = 1
    oven: Oven = Oven(degrees=100)
    dishes: tuple[Annotated[Pot | Pan, By("kind")], ...] = ()
    pantry: FilePath = Path("pantry")


def read(tmp_path: Path, text: str, schema: type[Settings] = Kitchen) -> Any:
    file = tmp_path / "kitchen.yaml"
    file.write_text(text, encoding="utf-8")
    return load_settings(file, schema)


def complaints(tmp_path: Path, text: str, schema: type[Settings] = Kitchen) -> list[str]:
    """The lines of the error, without the file's directory."""
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, text, schema)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


@pytest.mark.parametrize("path", ["", ".", "pan\\0try"])
def test_a_path_that_no_system_can_open_is_named(tmp_path: Path, path: str) -> None:
    (complaint,) = complaints(tmp_path, f'name: ours\npantry: "{path}"\n')
    assert complaint.startswith("kitchen.yaml:2: pantry: ")


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
        "kitchen.yaml:2: cooks: got 0; expected a number of at least 1."
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


def _refused(file: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(file, Kitchen)
    return str(caught.value)


def test_what_is_too_long_or_too_deep_for_a_configuration_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("[" * 50_000)
    assert "nested too deeply" in _refused(file)
    assert "has more than 1,000,000 characters" in _refused(Path("/dev/zero"))


# --- the words of refusals ---

WRONG = ("", "x" * 500, "four", 3.5, -7, -1e30, 10**30, float("nan"), [], [None], {}, {"x": []}, True, None)


def sections_of(schema: type[Schema]) -> Iterator[type[Schema]]:
    """A schema and all sections in it."""
    yield schema
    for field in fields_of(schema).values():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Schema):
                yield from sections_of(kind)


@pytest.mark.parametrize("schema", [FleetSettings, AgentSettings, Profile, Request, BrokerRequest])
def test_whatever_is_wrong_with_a_value_is_said_in_words_of_ours(schema: type[Schema]) -> None:
    said = set()
    for section in sections_of(schema):
        for key in section.names:
            for value in WRONG:
                try:
                    section.checked({key: value})
                except SchemaError as error:
                    for problem in error.problems:
                        if problem.fault not in (Fault.OTHER, Fault.RANGE):
                            continue
                        complaint = problem.complaint()
                        assert len(complaint) < 800
                        if problem.error is None:
                            said.add(problem.expected)
                            assert re.fullmatch(r"(got .+; )?expected \S.*[^.]", complaint), complaint
                        else:
                            assert re.search(r"\w{3}.*[^.]$", complaint), complaint
    assert len(said) > 3


def test_a_problem_names_the_value_and_what_was_expected(tmp_path: Path) -> None:
    problems = {
        "privacy: {epsilon: 0}": "privacy.epsilon: got 0; expected a number above 0.",
        "privacy: {epsilon: four}": "privacy.epsilon: got 'four'; expected a number.",
        "rounds: 1.5": "rounds: got 1.5; expected a whole number.",
        "cap: {kind: clamps}": "cap.kind: got 'clamps'; expected 'none', 'clamp', 'bounded' or 'published'.",
        "model: 3": "model: got 3; expected keys and values.",
        "model: {name: ''}": "model.name: got ''; expected text of at least 1 character.",
    }
    for line, expected in problems.items():
        file = tmp_path / "fleet.yaml"
        file.write_text(f"{line}\n")
        with pytest.raises(ConfigurationError) as caught:
            load_settings(file, FleetSettings)
        assert f"{file}:1: {expected}" in str(caught.value).splitlines()


def test_short_and_long_texts_are_read_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By libyaml and by PyYAML itself, from which all complaints come."""
    values = (
        "a: {b: [1e-5, 1.5E3, .inf, 0x1F, 017, 1_000, 12:30:45, yes, null, ~, 2026-01-02]}\n"
        "c: |\n  two\n  lines\nd: >-\n  one\n  line\n'e': \"\\u03b5\"\n? f\n: - g\n  - &h {i: ε}\n  - *h\n"
    )
    texts = [values, "a: 1\na: 2\n", "a: [1", "a: b: c", "a: \x01", "\ta: 1", "a: !!python/object:x.y {}"]
    texts += ["- " * 1_990 + "a", "a: &x [*x]", "", "--- 1\n--- 2\n"]
    file, said = tmp_path / "x.yaml", []
    for most in (yaml_file._SHORT, -1):
        monkeypatch.setattr(yaml_file, "_SHORT", most)
        said.append([])
        for text in texts:
            file.write_text(text)
            try:
                document = read_document(file, example="a: 1")
                said[-1].append((repr(document.values), document.lines))
            except ConfigurationError as error:
                said[-1].append(str(error))
    assert said[0] == said[1]
    assert isinstance(said[0][0], tuple)
    assert all(isinstance(each, str) for each in said[0][1:])
