"""A profile fits boards with at least 80 % of its memory."""

from __future__ import annotations

import math
import os

import pytest

from agent.profile import check_board, load_profile, profile_names
from dpagent.errors import ConfigurationError, ExitCode

FITTED_MIB = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def test_a_profile_of_a_bigger_board_is_refused_with_the_others_named() -> None:
    most = math.floor(FITTED_MIB / 0.8)
    profile = load_profile("generic-linux")
    for fits in (1, FITTED_MIB, most):
        check_board(profile.model_copy(update={"memory_mib": fits}))
    with pytest.raises(ConfigurationError) as caught:
        check_board(profile.model_copy(update={"memory_mib": most + 1}))
    assert caught.value.exit_code == ExitCode.CONFIGURATION
    assert all(part in str(caught.value) for part in (str(most + 1), str(FITTED_MIB), *profile_names()))
