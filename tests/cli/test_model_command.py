"""``dpagent model``: what a person is shown, and files that the programs read back."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import onnx
import pytest
import yaml
from commands import Result, dpagent, dpagent_process
from frozen_networks import of_chance, tanh

from agent.settings import AgentSettings
from dpagent.learning.front_end.network_check import operators
from dpagent.learning.model_files import load_model
from dpagent.learning.models.built_ins import BUILT_IN, built_in
from dpagent.learning.models.costs import forward_flops, record_bytes, working_bytes
from dpagent.learning.models.description import from_description
from dpagent.learning.models.layers import LAYERS, Conv2d, Dense, MaxPool2d, Residual, Tanh
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import STAGES
from dpagent.learning.training.onnx_graph.signature import known_digests

OWN = """\
name: own
input_shape: [6, 6, 1]
classes: 3
front_end:
  - random: {layers: [{conv2d: {channels: 4, kernel: 3}}, tanh], seed: 5}
layers:
  - residual: {body: [{conv2d: {channels: 4, kernel: 3, padding: 1}}, relu]}
  - dense: 3
"""


def model(*arguments: str | Path) -> Result:
    return dpagent("model", *arguments)


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    return path


def test_a_script_is_told_of_all_built_in_models(tmp_path: Path) -> None:
    target = tmp_path / "models.json"
    result = model("list", "--json", target)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    found = json.loads(target.read_text())["models"]
    assert [entry["name"] for entry in found] == sorted(BUILT_IN)
    for entry in found:
        spec = built_in(entry["name"])
        assert entry == {
            "name": spec.name, "input_shape": list(spec.input_shape), "classes": spec.classes,
            "parameters": spec.parameter_count, "digest": spec.digest().hex(),
            "front_end": ["scattering"] if spec.name == "scattering" else [],
        }  # fmt: skip
    assert json.loads(model("list", "--json", "-").stdout) == {"models": found}
    assert model("list", "--json", tmp_path / "no" / "x.json").returncode == 8


def test_all_built_in_models_are_listed_with_their_parameters() -> None:
    result = model("list")
    assert result.returncode == 0, result.stderr
    rows = rows_of(result.stdout)
    assert [row[0] for row in rows[1:]] == sorted(BUILT_IN)
    assert ["mnist-cnn", "28", "×", "28", "×", "1", "10", "26,010"] in rows


def test_a_model_is_shown_layer_by_layer() -> None:
    result = model("show", "mnist-cnn")
    assert result.returncode == 0, result.stderr
    rows = rows_of(result.stdout)
    # By hand: a window of 8×8 and a bias for each of 16 filters, at 14×14 places; two operations a weight.
    words = "0 conv2d channels 16, kernel 8, stride 2, padding 3 14 × 14 × 16 1,040 407,680"
    assert words.split() in rows
    assert "26,010" in [row[0] for row in rows if len(row) == 2]
    assert ["digest", built_in("mnist-cnn").digest().hex()] in rows
    assert any(row[:1] == ["graph"] and "known" in row for row in rows)


def test_front_end_and_branches_of_a_model_of_ones_own_are_shown(own: Path) -> None:
    result = model("show", own)
    assert result.returncode == 0, result.stderr
    rows = rows_of(result.stdout)
    words = "front end 0 random layers conv2d, tanh, seed 5 4 × 4 × 4 frozen"
    assert words.split() in rows
    assert ["shortcut:", "as", "it", "is"] in rows
    assert ["features", "4", "×", "4", "×", "4,", "computed", "once", "a", "record", "and", "kept"] in rows
    (room,) = (row for row in rows if row[:2] == ["on", "disk"])
    assert room[2:4] == ["data.features_mib:", "1"]
    assert any(row[:1] == ["graph"] and "trusted:" in row for row in rows)


def test_a_network_is_checked_and_shown_by_the_digest_that_the_agent_takes(tmp_path: Path, own: Path) -> None:
    values = yaml.safe_load(OWN) | {"input_shape": [4], "layers": [{"dense": 3}]}
    own.write_text(yaml.safe_dump(values | {"front_end": [{"onnx": {"file": "net.onnx"}}]}))
    (tmp_path / "net.onnx").write_bytes(tanh())
    result = model("show", own)
    assert result.returncode == 0, result.stderr
    digest = hashlib.sha256(tanh()).hexdigest()
    assert ["network", f"{digest},", "for", "trusted_graphs", "in", "agent.yaml"] in rows_of(result.stdout)
    (tmp_path / "net.onnx").write_bytes(of_chance())
    result = model("show", own)
    assert result.returncode == 3
    assert "net.onnx, node 0 'the RandomUniformLike' (RandomUniformLike) is not among" in result.stderr
    (tmp_path / "net.onnx").write_bytes(tanh())
    without = dpagent_process("model", "show", own, before="import sys; sys.modules['onnx'] = None")
    assert without.returncode == 3
    assert "'onnx'" in without.stderr
    assert "'coordinator'" in without.stderr


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_the_yaml_of_a_model_is_that_model(name: str, tmp_path: Path) -> None:
    result = model("show", name, "--yaml")
    assert result.returncode == 0, result.stderr
    file = tmp_path / "model.yaml"
    file.write_text(result.stdout)
    assert load_model(file) == built_in(name)


def test_the_yaml_of_a_model_with_every_kind_of_stage_is_that_model(tmp_path: Path, own: Path) -> None:
    values = yaml.safe_load(OWN)
    values["input_offset"] = [0.25]
    values["front_end"] += [
        {"scattering": {"scales": 1, "angles": 2}},
        {"onnx": {"digest": "0123456789abcdef" * 4, "output_shape": [2, 2, 4]}},
        {"projection": 12},
    ]
    values["layers"] = [{"dense": 3}]
    own.write_text(yaml.safe_dump(values))
    again = tmp_path / "again.yaml"
    again.write_text(model("show", own, "--yaml").stdout)
    assert load_model(again) == load_model(own)


def test_operations_are_those_of_the_plain_loops() -> None:
    spec = ModelSpec(
        "small", (5, 5, 2), 3,
        (Residual((Conv2d(2, kernel=3, padding=1), Tanh())), MaxPool2d(kernel=2, stride=2), Dense(3)),
    )  # fmt: skip
    products = 0
    for _place in range(5 * 5):
        for _filter in range(2):
            for _weight in range(3 * 3 * 2 + 1):
                products += 1
    assert [forward_flops(node) for node in spec.nodes] == [2 * products, 0, 2 * 3 * (2 * 2 * 2 + 1)]


def test_memory_grows_with_the_microbatch_until_the_caches_are_full() -> None:
    digits, cifar = built_in("digits"), built_in("cifar-cnn")
    assert working_bytes(digits, 32) == 32 * record_bytes(digits)
    assert working_bytes(cifar, 32) == 4 * record_bytes(cifar)
    # 8 × 8 × 16 activations in four bytes, of one layer of several.
    assert record_bytes(digits) > 8 * 8 * 16 * 4


def test_a_graph_is_printed_as_a_digest_that_the_agent_takes(tmp_path: Path, own: Path) -> None:
    file = tmp_path / "graph.onnx"
    result = model("graph", own, "--views", "2", "--per-layer", "--output", file)
    assert result.returncode == 0, result.stderr
    digest = result.stdout.strip()
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    graph = onnx.load(str(file)).graph
    inputs = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in graph.input}
    assert inputs["inputs"][1:] == [2, 4, 4, 4]  # two views of the features
    assert inputs["clip_norms"] == [2]
    line = yaml.safe_load(result.stderr.split(":\n", 1)[1])
    assert line == {"trusted_graphs": [digest]}
    assert set(line) <= set(AgentSettings.names)


def test_the_graph_of_a_built_in_model_is_one_that_devices_know() -> None:
    result = model("graph", "digits")
    assert (built_in("digits").digest().hex(), result.stdout.strip()) in known_digests()
    assert "nothing needs to be set" in result.stderr
    assert model("graph", "digits", "--views", "2").stdout != result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["show", "no-such"], 3, "expected one of cifar-cnn, digits"),
        (["show", "missing.yaml"], 3, "missing.yaml"),
        (["show", "{own}", "--microbatch", "65"], 9, "a number of at most 64"),
        (["graph", "digits", "--views", "0"], 9, "a number of at least 1"),
        (["graph", "digits", "--output", "no/x.onnx"], 8, "no/x.onnx"),
        (["show", "{bad}"], 3, "layer 0 conv2d: unknown key 'wide'"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_a_code(
    own: Path, tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("{name: x, input_shape: [4], classes: 2, layers: [{conv2d: {wide: 3}}]}")
    result = model(*(part.format(own=own, bad=bad) for part in arguments))
    assert result.returncode == code, result.stderr
    assert text in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


def test_without_onnx_models_are_shown_and_the_extra_is_named_for_graphs() -> None:
    hide = "import sys; sys.modules['onnx'] = None"
    assert dpagent_process("model", "show", "digits", before=hide).returncode == 0
    result = dpagent_process("model", "graph", "digits", before=hide)
    assert (result.returncode, "'coordinator'" in result.stderr) == (3, True)


def test_help_and_the_agent_do_without_what_only_some_commands_need() -> None:
    program = (
        "import sys, cli.main; from agent.daemon import Agent;"
        " print(*[n for n in ('onnx', 'matplotlib', 'PIL', 'scipy', 'sklearn') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
    program = (
        "import sys, cli.main; print(*[n for n in ('numpy', 'onnxruntime', 'onnx') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_the_page_on_models_names_every_part_and_its_examples_load() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    kinds = {row[0].strip("| `"): row for row in rows}
    shapes = {"1d": [16, 16], "2d": [16, 16, 16]}
    for kind in (*LAYERS, *STAGES):
        assert kind in kinds, kind
        example = yaml.safe_load(kinds[kind][-1].strip("| `").replace("0f3c…", "a" * 64))
        where = "layers" if kind in LAYERS else "front_end"
        model = {"name": "x", "input_shape": shapes[kind[-2:] if kind[-2:] in shapes else "2d"], "classes": 2}
        model |= {"layers": [{"dense": 2}], where: [example, *[{"dense": 2}] * (where == "layers")]}
        spec = from_description(model)
        made = spec.layers[0] if kind in LAYERS else spec.front_end[0]
        assert made.kind == kind
        for field in fields(made):
            assert f"`{field.name}`" in kinds[kind][1], (kind, field.name)
    for name, spec in BUILT_IN.items():
        assert any(row[0] == f"| `{name}`" and row[2] == f"{spec.parameter_count:,}" for row in rows), name
    listed = page.split("### Frozen networks", 1)[1].split("\n\n`Abs`", 1)[1].split("\n\n", 1)[0]
    assert ["Abs", *re.findall(r"`(\w+)`", listed)] == list(operators())
    blocks = page.split("```yaml\n")[1:]
    assert [from_description(yaml.safe_load(block.split("```")[0])).name for block in blocks] == [
        "porch", "features",
    ]  # fmt: skip
