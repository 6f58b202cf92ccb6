"""Which mixer a device accepts: its owner's list decides, not the plan."""

from __future__ import annotations

from typing import Any

import pytest
from fleets import make_plan
from pydantic import ValidationError

from agent.limit_settings import LimitSettings
from agent.limits import BeyondLimitError, require_mixer
from dpagent.protocol.mixing import key_text

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
    with pytest.raises(ValidationError, match="mixer"):
        LimitSettings(**limits)
