"""What became of a run's fragments."""

from __future__ import annotations

from simulation.collection import ChargedFragment, tally_fragments
from simulation.record import FragmentTally


def test_every_charged_fragment_is_counted_expired_or_lost() -> None:
    closed_at = {1: 100.0}
    fragments = [
        ChargedFragment(b"counted", 1, 90.0, True),
        ChargedFragment(b"counted, receipt lost", 1, 90.0, False),
        ChargedFragment(b"counted, the note of sending lost", 1, None, False),
        ChargedFragment(b"receipted and not counted", 1, 99.5, True),
        ChargedFragment(b"sent in good time and not counted", 1, 97.9, False),
        ChargedFragment(b"sent just before the end", 1, 98.1, False),
        ChargedFragment(b"sent too late", 1, 101.0, False),
        ChargedFragment(b"never sent", 1, None, False),
        ChargedFragment(b"of a round that is open", 2, 103.0, False),
    ]
    counted = {fragment.digest for fragment in fragments if fragment.digest.startswith(b"counted")}
    tally = tally_fragments(fragments, counted | {b"a stranger's"}, closed_at, duplicates=4, rejected=5)
    assert tally == FragmentTally(
        charged=9, sent=8, counted=3, expired=4, duplicates=4, rejected=5, lost=2
    )  # fmt: skip
    assert tally.charged == tally.counted + tally.expired + tally.lost
    assert tally_fragments([], set(), {}, duplicates=0, rejected=0) == FragmentTally(0, 0, 0, 0, 0, 0, 0)
