"""Profiles: one builds on another, this board's is found, and one of a bigger board is refused."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

import pytest

from agent.board import Board, _architecture
from agent.profile import check_board, detect_profile, load_profile, open_profile, profile_names
from dpagent.errors import ConfigurationError, ExitCode

FITTED_MIB = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def test_a_profile_of_a_bigger_board_is_refused_with_the_others_named() -> None:
    most = math.floor(FITTED_MIB / 0.8)
    profile = load_profile("generic-x86-64")
    for fits in (1, FITTED_MIB, most):
        check_board(profile.with_values({"board": profile.board.with_values({"memory_mib": fits})}))
    bigger = profile.board.with_values({"memory_mib": most + 1})
    with pytest.raises(ConfigurationError) as caught:
        check_board(profile.with_values({"board": bigger}))
    assert caught.value.exit_code == ExitCode.CONFIGURATION
    assert all(part in str(caught.value) for part in (str(most + 1), str(FITTED_MIB), *profile_names()))


# --- one builds on another ---


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_profile_keeps_what_it_does_not_set_of_the_one_that_it_extends(tmp_path: Path) -> None:
    write(tmp_path, "ours.yaml", "extends: raspberry-pi-cm4\nmicrobatch: 4\nlimits: {minimum_fragments: 9}\n")
    mine = write(
        tmp_path,
        "mine.yaml",
        "extends: ours.yaml\nboard: {storage: NVMe}\nlimits: {messages_per_second: 2}\n",
    )
    loaded, below = open_profile(mine), load_profile("raspberry-pi-cm4")
    profile = loaded.profile
    assert (profile.microbatch, profile.limits.minimum_fragments, profile.limits.messages_per_second) == (
        4, 9, 2,
    )  # fmt: skip
    assert profile.limits.maximum_model_mib == below.limits.maximum_model_mib != 48
    assert profile.board == below.board.with_values({"storage": "NVMe"})
    names = [name for name, _ in loaded.chain]
    assert names == [mine, "ours.yaml", "raspberry-pi-cm4", "raspberry-pi-4", "generic-arm64"]


def test_lists_are_replaced_as_a_whole(tmp_path: Path) -> None:
    mine = write(tmp_path, "mine.yaml", "extends: raspberry-pi-4\nboard: {compatible: [acme]}\n")
    assert load_profile(mine).board.compatible == ("acme",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extends: mine.yaml\n", "builds on itself"),
        ("extends: other.yaml\n", "builds on itself"),
        ("extends: nobody.yaml\n", "No such file"),
        ("extends: cray-1\n", "profile is 'cray-1'; expected auto, one of"),
        ("extends: 7\n", "mine.yaml:1: extends: "),
        ("extends: broken.yaml\n", "broken.yaml:2: microbatch: got 0; expected a number of at least 1"),
        ("extends: raspberry-pi-4\nmicrobatch: 100\n", "mine.yaml:2: microbatch: got 100"),
        ("extends: raspberry-pi-4\nboard: {cores: none}\n", "mine.yaml:2: board.cores: "),
        ("extends: raspberry-pi-4\nmicrobatches: 3\n", "mine.yaml:2: microbatches: unknown key"),
        ("extends: raspberry-pi-4\nboard: 3\n", "mine.yaml:2: board: "),
        ("microbatch: 3\n", "mine.yaml:1: board: this key is missing"),
    ],
)
def test_what_is_wrong_in_a_chain_is_named_with_its_file(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path, "other.yaml", "extends: mine.yaml\n")
    write(tmp_path, "broken.yaml", "extends: generic-arm64\nmicrobatch: 0\n")
    mine = write(tmp_path, "mine.yaml", text)
    with pytest.raises(ConfigurationError) as caught:
        load_profile(mine)
    assert str(caught.value).startswith(mine)
    assert words in str(caught.value)


# --- this board's is found ---


def device_tree(folder: Path, *compatible: str, model: str = "A board") -> Path:
    """As the kernel shows it."""
    (folder / "compatible").write_bytes(b"".join(each.encode() + b"\0" for each in compatible))
    (folder / "model").write_bytes(model.encode() + b"\0")
    return folder


@pytest.mark.parametrize(
    ("machine", "compatible", "name"),
    [
        ("aarch64", ("raspberrypi,4-model-b", "brcm,bcm2711"), "raspberry-pi-4"),
        ("aarch64", ("raspberrypi,4-compute-module", "brcm,bcm2711"), "raspberry-pi-cm4"),
        ("aarch64", ("raspberrypi,model-zero-2-w", "brcm,bcm2837"), "raspberry-pi-zero-2-w"),
        ("aarch64", ("acme,board", "radxa,rock-5b", "rockchip,rk3588"), "rock-5b"),
        ("aarch64", ("acme,board", "brcm,bcm2711"), "generic-arm64"),
        ("aarch64", (), "generic-arm64"),
        ("armv7l", ("raspberrypi,4-model-b", "brcm,bcm2711"), "generic-armv7"),
        ("armv7l", ("ti,am335x-bone-black", "ti,am335x-bone", "ti,am33xx"), "beaglebone-black"),
        ("armv6l", ("raspberrypi,model-zero-w", "brcm,bcm2835"), "raspberry-pi-zero"),
        ("x86_64", (), "generic-x86-64"),
    ],
)
def test_a_board_gets_its_profile_by_its_device_tree(
    tmp_path: Path, machine: str, compatible: tuple[str, ...], name: str
) -> None:
    board = Board.this(device_tree(tmp_path, *compatible))
    assert (board.model, board.compatible) == ("A board", compatible)
    assert detect_profile(Board(machine, 4, 1024, board.model, board.compatible)) == name


def test_without_a_device_tree_the_board_has_no_name_and_gets_the_generic_profile(tmp_path: Path) -> None:
    board = Board.this(tmp_path / "none")
    assert (board.model, board.compatible) == ("", ())
    assert (board.architecture, board.cores) == (platform.machine(), len(os.sched_getaffinity(0)))
    assert board.memory_mib == FITTED_MIB


def test_a_device_tree_that_never_ends_or_is_no_text_is_read_in_part(tmp_path: Path) -> None:
    (tmp_path / "compatible").write_bytes(b"\xff\xfe\0" + b"x" * 100_000)
    assert [len(each) for each in Board.this(tmp_path).compatible] == [2, 4_093]


@pytest.mark.parametrize(
    ("machine", "has_64_bits", "name"),
    [
        ("aarch64", True, "aarch64"),
        ("aarch64", False, "armv7l"),
        ("armv8l", False, "armv7l"),
        ("armv7l", False, "armv7l"),
        ("armv6l", False, "armv6l"),
        ("x86_64", True, "x86_64"),
        ("x86_64", False, "i686"),
    ],
)
def test_a_32_bit_system_on_a_64_bit_kernel_is_one_of_32_bits(
    machine: str, has_64_bits: bool, name: str
) -> None:
    assert _architecture(machine, has_64_bits) == name


def test_an_architecture_without_a_profile_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"'riscv64'.*Set profile to the path"):
        detect_profile(Board("riscv64", 4, 1024))


def test_no_name_of_a_device_tree_belongs_to_two_profiles() -> None:
    names = [each for name in profile_names() for each in load_profile(name).board.compatible]
    assert len(names) == len(set(names)) > 15


@pytest.mark.parametrize("name", [each for each in profile_names() if not each.startswith("generic-")])
def test_every_board_says_where_its_facts_are_from(name: str) -> None:
    board = load_profile(name).board
    assert board.compatible
    assert any(each.startswith("https://github.com/torvalds/linux/") for each in board.sources)
    assert len(board.sources) > 1
