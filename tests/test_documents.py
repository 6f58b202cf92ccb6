"""Pages that state what the code enforces are kept alike with it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from dpagent.privacy.mechanisms.registry import MECHANISMS
from dpagent.protocol import chunks, messages, terms
from dpagent.protocol.topics import Topics

DOCS = Path(__file__).parent.parent / "docs"
TEST_FILES = sorted(Path(__file__).parent.rglob("test_*.py"))


def named_in(file: Path) -> set[str]:
    """The names of a file's tests."""
    return set(re.findall(r"^def (test_\w+)\(", file.read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_configuration_page_is_made_from_the_schemas() -> None:
    made = runpy.run_path(str(DOCS / "make_configuration.py"))["render"]()
    assert made == (DOCS / "configuration.md").read_text(), "run: python docs/make_configuration.py"
    assert "=<" not in made


@pytest.mark.parametrize(
    ("section", "schema"),
    [
        ("plan", messages.Plan),
        ("model", messages.ModelChunk),
        ("fragment", messages.Fragment),
        ("receipts", messages.Receipts),
        ("signed", messages.Signed),
        ("sealed", messages.Sealed),
    ],
)
def test_protocol_page_lists_exactly_the_fields_of_a_message(
    section: str, schema: type[terms.Message | messages.Layout]
) -> None:
    page = (DOCS / "protocol.md").read_text()
    text = page.split(f"### {section}\n", 1)[1].split("\n#", 1)[0]
    named = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    if issubclass(schema, terms.Message):
        assert set(named) == set(schema.names)
    else:
        assert tuple(named) == schema.__match_args__  # in their order


@pytest.mark.parametrize(
    ("key", "schema"),
    [
        ("model", messages.ModelTerms),
        ("mechanism", terms.MechanismTerms),
        ("clipping", terms.ClippingTerms),
        ("sampling", terms.SamplingTerms),
        ("projection", terms.ProjectionTerms),
        ("augmentation", terms.AugmentationTerms),
        ("cap", terms.CapTerms),
        ("schedule", terms.ScheduleTerms),
        ("wire", messages.WireTerms),
    ],
)
def test_protocol_page_lists_the_keys_of_a_plans_maps(key: str, schema: type[terms.Message]) -> None:
    row = next(
        line
        for line in (DOCS / "protocol.md").read_text().splitlines()
        if line.startswith(f"| `{key}` | map")
    )
    for field in schema.names:
        assert f"`{field}`" in row


def test_protocol_page_lists_the_parameters_of_every_mechanism() -> None:
    page = (DOCS / "protocol.md").read_text()
    text = page.split("#### Mechanisms\n", 1)[1].split("\n#", 1)[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")][1:]
    expected = []
    for name, mechanism in sorted(MECHANISMS.items()):
        least, most = mechanism.noise_range
        meaning = "the noise's parameter over the sensitivity"
        expected.append(f"| `{name}` | noise multiplier | {least:,g} to {most:,g} | {meaning} |")
        expected += [
            f"| `{name}` | `{each.name}` | {each.least:,} to {each.most:,} | {each.meaning} |"
            for each in mechanism.parameters
        ]
    assert rows == expected


def test_protocol_page_names_the_topics_and_the_limit() -> None:
    page = (DOCS / "protocol.md").read_text()
    topics = Topics("FLEET")
    assert (
        topics.asset_chunk("ROLE", 0).replace("FLEET", "{fleet}").replace("ROLE/0", "{role}/{index}") in page
    )
    for topic in (topics.plan, topics.model_chunks, topics.fragments, topics.receipts):
        assert topic.replace("FLEET", "{fleet}").replace("+", "{index}") in page
    assert f"{messages.MAX_MESSAGE_BYTES:,} bytes" in page


def test_protocol_page_states_the_sizes_that_receivers_accept() -> None:
    page = (DOCS / "protocol.md").read_text()
    largest = messages.MAX_WHOLE_BYTES
    assert f"`parameters` (1 to {largest // 4:,})" in page
    assert f"`size` in bytes (1 to {largest:,})" in page
    assert f"| `index` | 0 to {messages.MAX_CHUNKS - 1:,} | which chunk: as many as {largest:,} bytes" in page
    assert f"it\nholds {chunks.Assembler.FOREIGN_BYTES >> 20} MiB" in page


def test_local_links_lead_somewhere() -> None:
    for page in [DOCS.parent / "README.md", *DOCS.rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_privacy_page_names_tests_and_modules_that_exist() -> None:
    page = (DOCS / "privacy.md").read_text(encoding="utf-8")
    root = DOCS.parent
    defined = {name for file in TEST_FILES for name in (file.stem, *named_in(file))}
    named = set(re.findall(r"\btest_\w+", page))
    assert len(named) > 100
    assert named <= defined
    modules = set(re.findall(r"`((?:\w+/)*\w+\.py)`", page))
    assert len(modules) > 30
    known = {file.name for file in (root / "dpagent/privacy").rglob("*.py")}
    missing = [name for name in modules if not (root / name).exists() and name not in known]
    assert missing == []


def test_the_threat_model_names_tests_where_they_are_and_every_attack() -> None:
    page = (DOCS / "threat-model.md").read_text(encoding="utf-8")
    root, named = Path(__file__).parent, set(re.findall(r"`((?:\w+/)+test_\w+\.py)`", page))
    for name in named:
        assert (root / name).exists(), name
    assert {f"adversary/{file.name}" for file in TEST_FILES if file.parent.name == "adversary"} <= named
    for name, tests in re.findall(r"`((?:\w+/)+test_\w+\.py)`: ((?:`test_\w+`(?:, )?)+)", page):
        assert set(re.findall(r"\w+", tests)) <= named_in(root / name), name
    assert len(re.findall(r"`test_\w+`", page)) > 15


def test_the_page_of_brokers_has_what_the_suite_saw() -> None:
    render = runpy.run_path(str(DOCS / "make_brokers.py"))["render"]
    assert render() == (DOCS / "brokers.md").read_text(encoding="utf-8")
