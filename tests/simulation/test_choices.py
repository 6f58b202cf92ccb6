"""What the demo makes of data and options before anything starts: data, model, settings, outlook."""

from __future__ import annotations

import gzip
import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import dpagent
from demos import own, settled
from pictures import encoded, folder_of, noise, write, zip_of

from dpagent.errors import ConfigurationError, DataError, DpagentError, PlanError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.front_end.features import FrontEnd
from dpagent.learning.model_files import load_model
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.layers import Dense
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.privacy.clipping import Clipping
from simulation.choices import choose_model, settle
from simulation.data.remarks import remarks_on
from simulation.data.shards import deal
from simulation.data.source import open_source
from simulation.fitting_model import derived_model, fitting_model, model_file
from simulation.fleet import Fleet
from simulation.layout import Layout
from simulation.outlook import signal_to_noise
from simulation.planning import trial_job, trial_planner
from simulation.presets import preset_of, sampling_rate_for
from simulation.programs.configurations import fleet_settings
from simulation.programs.timing import round_times
from simulation.request import DataSelection, Request, data_name
from simulation.settings import DataForm, RunSettings, load_settings_of_run

MNIST = DataSelection(dataset="mnist", train=DatasetSettings(path=Path("mnist")))
HALVES = ("train", "test")
SHAPES = [
    (1,), (8,), (3000,), (1, 1), (10, 2), (16, 1), (17, 3), (64, 3), (128, 9), (1000, 1), (5, 5, 1),
    (7, 40, 3), (8, 8, 1), (12, 30, 1), (15, 16, 3),
]  # fmt: skip


LARGE = [
    pytest.param(shape, marks=pytest.mark.slow)
    for shape in ((28, 28, 1), (33, 32, 3), (64, 48, 3), (100, 250, 1))
]


@pytest.mark.parametrize("shape", [*SHAPES, *LARGE], ids=str)
def test_every_form_of_data_gets_a_model_that_can_be_trained_and_read_back(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    spec = derived_model(shape, 3)
    file = tmp_path / "model.yaml"
    file.write_bytes(model_file(spec))
    assert load_model(file).digest() == spec.digest()
    inputs = np.random.default_rng(0).random((4, *shape), np.float32)
    features = FrontEnd(spec)(inputs)
    total = NumpyEngine(spec.head).clipped_sum(
        spec.initial_weights(0), features, np.array([0, 1, 2, 0]), [1.0]
    ).total  # fmt: skip
    assert 0 < np.linalg.norm(total) <= 4.01
    # Noise enters every parameter, so that what is made by rule stays small.
    assert spec.parameter_count <= max(60_000, 20 * math.prod(shape))


def test_a_front_end_and_few_parameters_are_preferred_to_a_built_in_model() -> None:
    assert fitting_model([28, 28, 1], 10) == built_in("scattering")
    assert fitting_model([28, 28, 1], 26).name == "image-28x28x1"
    assert fitting_model([32, 32, 3], 10).parameter_count < built_in("resnet-8").parameter_count
    assert fitting_model([128, 9], 6).parameter_count < built_in("sensor-cnn").parameter_count


@pytest.mark.parametrize(
    ("epsilon", "rounds", "rate", "sampling_rate"),
    [
        (0.5, 100, 1.5, 0.1), (2, 200, 3, 0.1), (8, 200, 6, 0.3), (1, 150, 2.25, 0.1), (4, 200, 4.5, 0.2),
        (0.1, 100, 1.5, 0.1), (90, 200, 6, 0.3),
    ],
)  # fmt: skip
def test_the_scattering_preset_follows_epsilon(
    epsilon: float, rounds: int, rate: float, sampling_rate: float
) -> None:
    preset = preset_of(Request(data=MNIST, model="scattering", epsilon=epsilon))
    assert (preset.rounds, preset.cap, preset.clip_norm) == (rounds, "none", 0.2)
    assert (preset.learning_rate, preset.sampling_rate) == pytest.approx((rate, sampling_rate))


def test_a_model_without_a_preset_follows_the_rules() -> None:
    assert preset_of(Request(data=MNIST, model="my.yaml")).learning_rate == 0
    assert preset_of(Request(data=MNIST)).model == "mnist-cnn"
    assert [sampling_rate_for(n) for n in (1, 100, 400, 6000)] == [1.0, 1.0, 0.5, 0.13]


def test_signal_to_noise_is_the_ratio_of_lengths_that_noise_and_aligned_gradients_add_up_to() -> None:
    """Against draws: the clipping's own way from noise on the release to noise on the gradient."""
    generator, devices, lot = np.random.default_rng(4), 3, 0.2 * 50
    multipliers = np.linspace(6, 2, 40)
    for clipping in (
        Clipping.whole(600, 0.7),
        Clipping.whole(600, 0.7, count_weight=0.2),
        Clipping.layers((500, 80, 20), (0.1, 0.5, 0.3)),
    ):
        walk = np.zeros(600)
        for sigma in multipliers:
            scale = sigma * clipping.radius / (math.sqrt(devices) * lot)
            walk += clipping.gradient(generator.normal(size=clipping.dimension) * scale)
        signal = len(multipliers) * math.hypot(*clipping.norms)
        ratio = signal_to_noise(
            clipping, list(multipliers), sampling_rate=0.2, records_per_device=50, devices=devices
        )
        assert ratio == pytest.approx(signal / np.linalg.norm(walk), rel=0.12)


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_noise_of_every_device_is_in_the_outlook(noise: str) -> None:
    """Of each over twice the norm of an update; so twenty add √20 times that to the coordinator's."""
    form, spec = DataForm(1_437, 360, (8, 8, 1), 10), built_in("digits")
    request = Request(method="central", noise=noise, devices=20)
    (_, alone), (settings, both) = (
        settle(each, form, "digits", spec) for each in (request, request.with_values({"device_noise": 30.0}))
    )
    job = trial_job(fleet_settings(settings), spec)
    assert job.device is not None
    own, added = job.noise.multipliers[0], 2 * math.sqrt(20) * job.device.noise.multipliers[0]
    assert alone.signal_to_noise / both.signal_to_noise == pytest.approx(math.hypot(1, added / own), rel=1e-3)


def test_little_data_or_budget_is_called_what_it_is() -> None:
    spec = derived_model((40, 40, 3), 4)
    said = []
    for records, epsilon in ((20_000, 8.0), (480, 4.0), (480, 2.0), (480, 0.25)):
        form = DataForm(records, 100, (40, 40, 3), 4)
        _, outlook = settle(Request(data=own(Path("mine")), epsilon=epsilon), form, "", spec)
        said.append((outlook.verdict, str(outlook.warning).partition(". ")[0]))
    assert said == [
        ("good", "None"),
        ("doubtful", "Expect noise to cost some accuracy"),
        ("poor", "Expect noise to cost much accuracy"),
        ("hopeless", "Expect hardly anything to be learnt"),
    ]
    assert "With 96 records on each of 5 devices, 18,304 parameters and ε = 0.25, all" in str(outlook.warning)


def test_a_bounded_cap_leaves_room_for_noise_that_the_budget_meets_or_is_refused() -> None:
    form, spec = DataForm(2000, 100, (8,), 3), derived_model((8,), 3)
    wanted = {"method": "incrementing", "noise": "laplace", "cap": "bounded", "rounds": 4}
    options = settled(form, spec, epsilon=30.0, **wanted)
    fleet = fleet_settings(options)
    lot = options.sampling_rate * options.records_per_device
    assert fleet.cap.kind == "bounded"
    assert fleet.cap.floor * lot == pytest.approx(3 * options.clip_norm, rel=0.01)
    trial_planner(fleet, spec, trial_job(fleet, spec)).require_acceptable()
    with pytest.raises(PlanError, match="cannot be met"):
        settled(form, spec, epsilon=0.1, **wanted)


def test_settings_follow_the_data_and_what_is_given_wins() -> None:
    form, spec = DataForm(2000, 100, (8,), 3), derived_model((8,), 3)
    options = settled(form, spec)
    assert (options.devices, options.rounds, options.sampling_rate, options.cap) == (5, 60, 0.5, "none")
    wider = settled(form, spec, clip_norm=1.0)
    assert wider.learning_rate == pytest.approx(options.learning_rate / 2, rel=0.02)
    given = settled(form, spec, sampling_rate=0.3, learning_rate=0.7, cap="clamp", rounds=7, devices=2)
    assert (given.sampling_rate, given.learning_rate, given.cap, given.rounds) == (0.3, 0.7, "clamp", 7)
    assert given.records_per_device == 1000


def test_a_large_model_gets_more_fragments() -> None:
    spec = ModelSpec("large", (4000,), 800, (Dense(800),))
    assert settled(DataForm(5000, 10, (4000,), 800), spec, rounds=2).fragments_per_update > 16
    assert settled(DataForm(5000, 10, (8,), 3), derived_model((8,), 3), rounds=2).fragments_per_update == 16


def test_an_update_is_cut_into_as_few_fragments_as_hold_it() -> None:
    spec = ModelSpec("large", (4000,), 800, (Dense(800),))
    fleet = fleet_settings(settled(DataForm(5000, 10, (4000,), 800), spec, rounds=2))
    fewer = fleet.with_values({"fragments_per_update": fleet.fragments_per_update - 1})
    trial_planner(fleet, spec, trial_job(fleet, spec)).require_acceptable()
    with pytest.raises(PlanError, match="fragments_per_update"):
        trial_planner(fewer, spec, trial_job(fewer, spec)).require_acceptable()


def test_noise_that_no_device_accepts_is_not_blamed_on_fragments() -> None:
    with pytest.raises(PlanError, match="round 1: ") as caught:
        settled(DataForm(5000, 10, (8,), 3), derived_model((8,), 3), epsilon=200.0, rounds=2)
    assert "fragments" not in str(caught.value)


def test_impossible_runs_are_refused() -> None:
    form, spec = DataForm(4, 1, (8,), 3), derived_model((8,), 3)
    with pytest.raises(DataError, match="4 training records cannot be split over 5 devices"):
        settled(form, spec)
    with pytest.raises(PlanError, match="epsilon"):
        settled(replace(form, train_records=500), spec, epsilon=1e-4)
    with pytest.raises(PlanError, match="`mixer`: there is 1 device"):
        settled(replace(form, train_records=500), spec, devices=1, mixer=True)


def test_records_are_held_out_of_each_class_and_no_record_is_on_both_sides(tmp_path: Path) -> None:
    labels = np.array([0] * 50 + [1] * 9 + [2] * 2 + [3], np.int64)
    inputs = np.arange(len(labels), dtype=np.float32)[:, np.newaxis]
    save_npz(tmp_path / "x.npz", ArrayDataset(inputs, labels, 4))
    source = open_source(own(tmp_path / "x.npz"), seed=1)
    train, test = (part.batch(np.arange(len(part)))[0][:, 0].tolist() for part in (source.train, source.test))
    assert sorted(train + test) == list(range(len(labels)))
    assert source.test.class_counts().tolist() == [10, 2, 1, 0]
    more = open_source(own(tmp_path / "x.npz", test_share=0.5), seed=1)
    assert more.test.class_counts().tolist() == [25, 4, 1, 0]


def test_whole_groups_are_held_out_where_groups_are_dealt(tmp_path: Path) -> None:
    rows = [f"{n},{n % 3},p{n // 10}" for n in range(200)]
    write(tmp_path / "x.csv", "\n".join(["a,label,who", *rows, ""]).encode())
    data = own(tmp_path / "x.csv", reading={"kind": "csv", "csv": {"group": "who"}}, split="file")
    source = open_source(data, seed=0)
    test = source.test.batch(np.arange(len(source.test)))[0][:, 0]
    groups, counts = np.unique(test // 10, return_counts=True)
    assert (len(groups), set(counts.tolist())) == (4, {10})
    form, spec = source.form, derived_model((1,), 3)
    settings, _ = settle(Request(data=data, devices=4), form, "", spec)
    shards = [
        set((shard.batch(np.arange(len(shard)))[0][:, 0] // 10).tolist()) for shard in deal(settings, source)
    ]
    assert sum(map(len, shards)) == 16
    assert set.union(*shards).isdisjoint(groups.tolist())


def idx_folder(root: Path, *halves: tuple[str, int]) -> Path:
    root.mkdir()
    for prefix, count in halves:
        pixels = np.zeros((count, 8, 8), np.uint8).tobytes()
        images = struct.pack(">IIII", 0x803, count, 8, 8) + pixels
        (root / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (root / f"{prefix}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, count) + bytes(n % 2 for n in range(count))
        )
    return root


def test_data_that_bring_a_test_half_are_tested_on_it(tmp_path: Path) -> None:
    both = idx_folder(tmp_path / "both", ("train", 20), ("t10k", 6))
    one = idx_folder(tmp_path / "one", ("train", 20))
    halves = tmp_path / "halves"
    folder_of(halves, *(f"train/{c}/{n}.png" for c in "ab" for n in range(5)), "test/a/0.png", "test/b/1.png")
    flat = tmp_path / "flat"
    folder_of(flat, *(f"{c}/{n}.png" for c in "ab" for n in range(10)))
    archive = zip_of(
        tmp_path / "halves.zip",
        {
            f"{half}/{c}/{n}.png": encoded(noise(n))
            for half in ("train", "val")
            for c in "ab"
            for n in range(3)
        },
    )
    nested = zip_of(
        tmp_path / "nested.zip",
        {f"all/{c}/{half}/{n}.png": encoded(noise(n)) for half in HALVES for c in "ab" for n in range(3)},
    )
    for path, expected in (
        (both, (20, 6)),
        (one, (16, 4)),
        (halves, (10, 2)),
        (flat, (16, 4)),
        (archive, (6, 6)),
        (nested, (10, 2)),
    ):
        form = open_source(own(path), seed=0).form
        assert (form.train_records, form.test_records) == expected, path
    asked = open_source(own(both, test_share=0.5), seed=0).form
    assert (asked.train_records, asked.test_records) == (10, 10)


def test_test_data_of_their_own_number_classes_as_the_training_data_do(tmp_path: Path) -> None:
    folder_of(tmp_path / "a", "ant/1.png", "bee/2.png", "cat/3.png")
    folder_of(tmp_path / "b", "bee/1.png", "cat/2.png")
    data = own(tmp_path / "a", test=DatasetSettings(path=tmp_path / "b", half="test"))
    assert open_source(data, seed=0).test.labels.tolist() == [1, 2]
    folder_of(tmp_path / "b", "dog/3.png")
    assert open_source(data, seed=0).test.labels.tolist() == [1, 2]
    folder_of(tmp_path / "c", "bee/1.png", "cat/2.png", width=9)
    with pytest.raises(DataError, match="expected the same form"):
        open_source(own(tmp_path / "a", test=DatasetSettings(path=tmp_path / "c")), seed=0)


def test_what_the_owner_should_know_is_said(tmp_path: Path) -> None:
    folder_of(tmp_path / "p", *(f"{c}/{n}.png" for c in "ab" for n in range(6)), width=8)
    whole = encoded(noise(1, width=8))
    write(tmp_path / "p" / "a" / "cut.png", whole[: len(whole) // 2])
    data = own(tmp_path / "p", reading={"kind": "images", "classes": ["a", "b", "yak"]})
    source = open_source(data, seed=0)
    said = " ".join(remarks_on(source, derived_model(source.form.shape, 3)))
    assert "Left out: a/cut.png" in said
    assert "No training record is of yak" in said
    assert "There are 2 test records: the accuracy is uncertain by about 35 points" in said
    assert "Inputs reach" not in said
    write(tmp_path / "x.csv", b"hpa,label\n" + b"".join(b"%d,%d\n" % (1000 + n, n % 2) for n in range(20)))
    source = open_source(own(tmp_path / "x.csv"), seed=0)
    said = " ".join(remarks_on(source, derived_model((1,), 2)))
    assert "Inputs reach 1,0" in said
    assert "`offset` and `scale`" in said


def test_settings_come_back_from_disk_and_other_ones_are_named(tmp_path: Path) -> None:
    file = write(tmp_path / "x.csv", b"a,label\n" + b"".join(b"%d,%d\n" % (n % 9, n % 2) for n in range(60)))
    root = tmp_path / "run"
    settings = Fleet(Request(data=own(file), rounds=3), root).settings
    assert not root.exists()  # nothing is written before all is settled
    settings.save(root)
    assert load_settings_of_run(root, RunSettings) == settings
    settings.require_match(root)
    other = settings.with_values({"data": own(file, split="class")})
    with pytest.raises(ConfigurationError, match=r"`data\.split` was 'iid' and is 'class'\."):
        other.require_match(root)
    scaled = settings.with_values({"data": own(file, reading={"csv": {"scale": 2.0}})})
    with pytest.raises(ConfigurationError, match=r"`data\.train\.csv\.scale` was None and is 2\.0\."):
        scaled.require_match(root)
    scaled.save(root)
    assert load_settings_of_run(root, RunSettings) == scaled
    with pytest.raises(ConfigurationError, match=r"`data\.train\.csv\.scale` was 2\.0 and is None\."):
        settings.require_match(root)
    for damaged in ('{"form": {"cats": 2}}', "[]", "", '{"data": {'):
        (root / "demo.json").write_text(damaged)
        with pytest.raises(ConfigurationError, match="damaged, or of another version"):
            load_settings_of_run(root, RunSettings)


def test_a_model_that_changed_since_the_run_began_is_refused(tmp_path: Path) -> None:
    layout, form = Layout(tmp_path), DataForm(20, 5, (8,), 3)
    layout.model_file.parent.mkdir()
    layout.model_file.write_bytes(model_file(derived_model((8,), 3)))
    assert choose_model(None, form, layout) == ("", derived_model((8,), 3))
    file = tmp_path / "mine.yaml"
    file.write_bytes(model_file(ModelSpec("table-8", (8,), 3, (Dense(3),))))
    with pytest.raises(ConfigurationError, match="another model"):
        choose_model(str(file), form, layout)
    with pytest.raises(ConfigurationError, match="no-such"):
        choose_model("no-such", form, layout)


def test_the_deadline_leaves_room_for_the_features_of_the_first_round() -> None:
    spec = built_in("scattering")
    options = settled(DataForm(60_000, 10_000, (28, 28, 1), 10), spec, devices=10)
    times = round_times(options, spec, {})
    assert times.features_s > 0
    assert times.deadline_s > times.compute_slot_s + options.jitter_window_s + 2 * times.features_s
    assert round_times(options, built_in("mnist-cnn"), {}).features_s == 0


@pytest.mark.parametrize(
    ("path", "name"), [("/data/my photos", "my photos"), ("/x/a\u202eb\x07", "ab"), ("/", "data")]
)
def test_data_are_called_by_their_path(path: str, name: str) -> None:
    assert data_name(Path(path)) == name


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 truncated", b"\x93NUMPY"])
def test_what_is_no_data_set_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    file = write(tmp_path / "data.npz", content)
    with pytest.raises(DpagentError, match=r"data\.npz"):
        open_source(own(file), seed=0)


def test_every_setting_that_changed_is_named_by_its_option(tmp_path: Path) -> None:
    settings = Fleet(Request(), tmp_path / "run").settings
    settings.save(tmp_path / "run")
    result = dpagent(
        "demo", "--state-dir", tmp_path / "run", "--rounds", "9", "--split", "class", "--devices", "3"
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (3, "")
    for change in (
        "`--devices` was 5 and is 3", "`--rounds` was 40 and is 9", "`--split` was 'iid' and is 'class'",
    ):  # fmt: skip
        assert change in result.stderr
    assert "form" not in result.stderr


def test_devices_that_pay_for_each_weight_get_the_smallest_model(tmp_path: Path) -> None:
    """With a preset of its own, and an outlook that says how little of it gets through."""
    form = DataForm(shape=[8, 8, 1], dtype="float32", classes=10, train_records=1_437, test_records=360)
    request = Request(method="ldp-fl")
    model, spec = choose_model(None, form, Layout(tmp_path), "ldp-fl")
    assert (model, spec.parameter_count) == ("", 650)
    settings, outlook = settle(request, form, model, spec)
    assert (settings.cap, settings.momentum, settings.norm) == ("none", 0.0, None)
    assert outlook.verdict == "poor"
    assert settle(request.with_values({"epsilon": 9.0}), form, model, spec)[1].verdict == "hopeless"
