"""Which mixer a device accepts: its owner's list decides, not the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from devices import open_device, sent_for
from fleets import make_plan

from agent.limit_settings import LimitSettings
from agent.limits import BeyondLimitError, require_mixer
from dpagent.protocol.mixing import key_text
from dpagent.schema.problems import SchemaError

OWNERS, OTHER = b"o" * 32, b"x" * 32
LISTED = (key_text(OWNERS),)


@pytest.mark.parametrize(
    ("mixer", "limits"),
    [
        (None, {}),
        (OTHER, {}),
        (None, {"mixer_keys": LISTED}),
        (OWNERS, {"mixer_keys": LISTED}),
        (OWNERS, {"mixer_keys": (key_text(b"a" * 32), *LISTED), "require_mixer": True}),
    ],
)
def test_a_plan_is_accepted(mixer: bytes | None, limits: dict[str, Any]) -> None:
    require_mixer(make_plan(mixer=mixer), LimitSettings(**limits))


@pytest.mark.parametrize(
    ("mixer", "required", "named"),
    [(OTHER, False, key_text(OTHER)), (OTHER, True, key_text(OTHER)), (None, True, "none")],
)
def test_a_plan_is_declined(mixer: bytes | None, required: bool, named: str) -> None:
    limits = LimitSettings(mixer_keys=LISTED, require_mixer=required)
    with pytest.raises(BeyondLimitError, match=r"limits\.mixer_keys") as caught:
        require_mixer(make_plan(mixer=mixer), limits)
    assert named in str(caught.value)


@pytest.mark.parametrize("limits", [{"require_mixer": True}, {"mixer_keys": ("AAAA",)}])
def test_settings_that_name_no_mixer_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="mixer"):
        LimitSettings(**limits)


@pytest.mark.parametrize("mixer", [OTHER, None], ids=["another", "none"])
@pytest.mark.parametrize("restarts", [False, True])
def test_an_update_does_not_leave_for_a_plan_with_another_mixer(
    tmp_path: Path, mixer: bytes | None, restarts: bool
) -> None:
    """The round was charged and spooled for the owner's mixer; then its plan comes again, changed."""
    limits = {"mixer_keys": list(LISTED), "require_mixer": True}
    plan, changed = make_plan(mixer=OWNERS), make_plan(mixer=mixer)
    with open_device(tmp_path, limits=limits) as device:
        device.take_plan(plan)
        device.give()
        device.advance()
        assert device.charged() == [1]
        assert device.pending()
        if not restarts:
            assert sent_for(device, changed) == 0
            assert sent_for(device, plan) > 0
    if restarts:
        with open_device(tmp_path, limits=limits) as device:
            assert sent_for(device, changed) == 0
            assert sent_for(device, plan) > 0
