"""Pictures take the form of a model."""

from __future__ import annotations

from pathlib import Path

from pictures import folder_of, write

from dpagent.learning.data.form_of_model import with_form_of
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.layers import Dense
from dpagent.learning.models.spec import ModelSpec


def test_pictures_take_the_form_of_a_model_where_no_setting_says_another(tmp_path: Path) -> None:
    folder_of(tmp_path / "p", "a/1.png", "b/2.png")
    spec = ModelSpec("wide", (6, 9, 1), 2, (Dense(2),))

    def form(settings: dict[str, object], model: ModelSpec = spec) -> tuple[list[int] | None, str | None]:
        made = with_form_of(DatasetSettings.model_validate({"path": tmp_path / "p"} | settings), model).images
        return made.size, made.mode

    assert form({}) == ([9, 6], "grey")
    assert form({"images": {"mode": "rgb"}}) == ([9, 6], "rgb")
    assert form({"images": {"size": [5, 4]}}) == ([5, 4], "grey")
    assert form({}, built_in("cifar-cnn")) == ([32, 32], "rgb")
    assert form({"shape": [54]}) == (None, None)
    assert form({}, ModelSpec("row", (54,), 2, (Dense(2),))) == (None, None)
    write(tmp_path / "x.csv", b"a,label\n1,0\n")
    assert form({"path": tmp_path / "x.csv"}) == (None, None)
