"""Which fragments count when more come than there are devices, and how they are dealt to groups."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from stores import open_store

from coordinator.database.settings import StorePlace
from coordinator.reader import StoreReader
from coordinator.seats import OpenedFragment
from coordinator.store import Store
from dpagent.errors import StorageError

SEATS = 4
LEVEL = 1e-6


@pytest.fixture
def store(place: StorePlace) -> Iterator[Store]:
    store = open_store(place)
    yield store
    store.database.close()


def fragment(value: int, position: int = 0, round_number: int = 1, *, dummy: bool = False) -> OpenedFragment:
    values = np.full(3, value, np.int64)
    return OpenedFragment(os.urandom(16), round_number, position, values, 0.0, dummy)


def held(store: Store, position: int = 0) -> int:
    """The sum of the values that hold a block's seats: powers of two say which."""
    (sums,) = store.sums(1)
    return int(sums[position][1][0])


def forget(store: Store) -> None:
    for table in ("fragments", "partial_sums", "tallies"):
        store.database.execute(f"DELETE FROM {table}")


def rows(store: Store) -> list[int]:
    """How many there are of all that is kept of fragments."""
    counts = []
    for table in ("fragments", "partial_sums", "tallies", "counters", "receipts"):
        counts.append(store.database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    return counts


def test_who_chooses_ids_chooses_no_seats(tmp_path: Path) -> None:
    """The same ids hold other seats at another coordinator, which has another secret."""
    ids = [bytes(15) + bytes([number]) for number in range(2 * SEATS)]
    found = set()
    for number in range(8):
        (directory := tmp_path / str(number)).mkdir()
        store = open_store(directory)
        chosen = [fragment(1 << place)._replace(id=each) for place, each in enumerate(ids)]
        store.count(chosen, 1, seats=SEATS)
        found.add(held(store))
        store.database.close()
    assert len(found) > 1


def test_no_block_holds_more_than_its_seats_and_each_refusal_is_counted(
    store: Store, place: StorePlace
) -> None:
    fragments = [fragment(1, position) for position in (0, 0, 1) for _ in range(SEATS)]
    counted = store.count(fragments, 1, seats=SEATS)
    assert store.counts(1) == {0: SEATS, 1: SEATS}
    assert counted.unseated == SEATS
    store.count([fragment(1, 1)], 1, seats=SEATS)
    reader = StoreReader(place)
    assert reader.counters() == {"rejected: block full": SEATS + 1}
    assert len(reader.fragments()) == 2 * SEATS
    reader.close()


@pytest.mark.parametrize("keeps_values", [True, False])
def test_values_of_one_byte_add_up_beyond_it_and_beside_wide_ones(store: Store, keeps_values: bool) -> None:
    """As they are read, most fragments have one byte a value, and a few have eight."""
    narrow, wide = np.array([127, -127, 1], np.int8), np.array([2**40, -(2**40), 128], np.int64)
    kinds = [narrow] * 300 + [wide] * 2
    fragments = [
        OpenedFragment(os.urandom(16), 1, position, each, 0.0) for position in (0, 1) for each in kinds
    ]
    for some in (fragments[:250], fragments[250:]):
        store.count(some, 1, seats=None, keeps_values=keeps_values)
    expected = 300 * narrow.astype(object) + 2 * wide.astype(object)
    (sums,) = store.sums(1)
    assert all(sums[position][1].tolist() == expected.tolist() for position in (0, 1))
    if keeps_values:
        dealt = store.sums(1, groups=3)
        assert [sum(group[0][1].tolist()[at] for group in dealt) for at in range(3)] == expected.tolist()


def test_the_seats_stay_full_across_restarts_and_whoever_lost_one_gets_none(tmp_path: Path) -> None:
    fragments = [fragment(1 << number) for number in range(3 * SEATS)]
    store = open_store(tmp_path)
    store.count(fragments, 1, seats=SEATS)
    before = held(store)
    for _ in range(3):
        store.database.close()
        store = open_store(tmp_path)
        store.count(fragments, 1, seats=SEATS)
        assert store.counts(1) == {0: SEATS}
        assert held(store) == before
    store.database.close()


def test_the_same_fragments_hold_the_seats_in_any_order_and_any_batches(store: Store) -> None:
    fragments = [fragment(1 << number) for number in range(3 * SEATS)]
    found = set()
    for _ in range(20):
        random.shuffle(fragments)
        for start in range(0, len(fragments), 5):
            store.count(fragments[start : start + 5], 1, seats=SEATS)
        found.add(held(store))
        forget(store)
    assert len(found) == 1
    assert found.pop().bit_count() == SEATS


def test_a_flood_that_comes_first_has_no_more_than_its_share(store: Store) -> None:
    """As many hostile fragments as honest ones, all before them: each side has half of the seats on average.

    200 blocks; the number of honest fragments is hypergeometric in each, so their sum is known. First come,
    first served would give 0.
    """
    blocks = 200
    for value in (0, 1):
        store.count(
            [fragment(value, position) for position in range(blocks) for _ in range(SEATS)], 1, seats=SEATS
        )
    (sums,) = store.sums(1)
    honest = sum(int(total[0]) for _, total in sums.values())
    law = stats.hypergeom(2 * SEATS, SEATS, SEATS)
    reach = stats.norm.isf(LEVEL / 2) * law.std() * blocks**0.5
    assert abs(honest - law.mean() * blocks) <= reach


def test_groups_are_equal_and_random_and_lose_nothing(store: Store) -> None:
    fragments = [fragment(1 << number, position) for position in (0, 1) for number in range(11)]
    store.count(fragments, 1, seats=11)
    store.count([fragment(1, 2)], 1, seats=11)
    for groups in (1, 3, 5, 11, 12):
        dealt = store.sums(1, groups=groups)
        assert len(dealt) == groups
        for position in (0, 1):
            counts = [group[position][0] for group in dealt if position in group]
            assert sum(counts) == 11
            assert max(counts) - min(counts) <= 1
            assert sum(int(group[position][1][0]) for group in dealt if position in group) == 2**11 - 1
        assert sum(2 in group for group in dealt) == 1
    by_block = [[group[position][1][0] for group in store.sums(1, groups=3)] for position in (0, 1)]
    assert by_block[0] != by_block[1], "each block is dealt anew"


def test_two_fragments_of_one_sender_meet_in_a_group_as_often_as_chance_has_it(tmp_path: Path) -> None:
    """Six fragments in three groups: two given ones meet with probability 1/5, in 1,000 blocks."""
    store, blocks = open_store(tmp_path), 1_000
    store.count([fragment(1 << n, position) for position in range(blocks) for n in range(6)], 1, seats=6)
    dealt = store.sums(1, groups=3)
    met = sum(
        int(group[position][1][0]) & 3 == 3 for position, group in itertools.product(range(blocks), dealt)
    )
    store.database.close()
    assert stats.binomtest(met, blocks, 1 / 5).pvalue > LEVEL


# --- dummies ------------------------------------------------------------------------------------


def test_in_which_order_receipts_leave_tells_no_dummy(store: Store) -> None:
    """A broker sees on which topics they come: those of dummies in a row would be known."""
    sent = [fragment(0, position, dummy=position % 2 == 0) for position in range(40)]
    for _ in range(2):
        assert store.count(sent, 1, seats=SEATS).receipted == sorted(each.id for each in sent)


def test_a_flood_of_dummies_leaves_a_number_behind_and_takes_no_seat(store: Store, place: StorePlace) -> None:
    store.count([fragment(1), fragment(0, dummy=True)], 1, seats=SEATS)
    before = rows(store)
    for _ in range(20):
        dummies = [fragment(0, position, dummy=True) for position in range(500)]
        counted = store.count(dummies, 1, seats=SEATS)
        assert counted.receipted == sorted(each.id for each in dummies)
    assert rows(store) == before
    assert store.counts(1) == {0: 1}
    with closing(StoreReader(place)) as reader:
        assert (held(store), len(reader.fragments())) == (1, 1)
        assert reader.counters() == {"dummies": 10_001}


def test_a_dummy_of_a_closed_round_gets_no_receipt(store: Store, place: StorePlace) -> None:
    assert store.count([fragment(0, dummy=True)], 2, seats=SEATS).receipted == []
    with closing(StoreReader(place)) as reader:
        assert reader.counters() == {"late": 1}


class Undone(Exception):
    pass


def test_a_flooded_block_gives_a_dummy_a_receipt_as_often_as_a_fragment(tmp_path: Path) -> None:
    """2,000 of each after a flood, two-sided at 1e-6."""
    store, blocks, each = open_store(tmp_path), 40, 50
    for position in range(blocks):
        store.count([fragment(1, position) for _ in range(3 * SEATS)], 1, seats=SEATS)
    receipts = {True: 0, False: 0}
    for dummy in (True, False):
        for position in range(blocks):
            for _ in range(each):
                newcomer = fragment(0, position, dummy=dummy)
                with contextlib.suppress(Undone), store.database.transaction():
                    receipts[dummy] += len(store._seats.take([newcomer], 1, SEATS).receipted)
                    raise Undone
    store.database.close()
    assert min(receipts.values()) > 0
    table = [[count, blocks * each - count] for count in receipts.values()]
    assert stats.fisher_exact(table).pvalue > LEVEL


def test_a_dummy_without_a_seat_stays_without_one(store: Store) -> None:
    store.count([fragment(1) for _ in range(2 * SEATS)], 1, seats=SEATS)
    dummies = [fragment(0, dummy=True) for _ in range(200)]
    first = store.count(dummies, 1, seats=SEATS)
    assert 0 < len(first.receipted) < 200, "which chance breaks once in a million times"
    assert first.unseated == 200 - len(first.receipted)
    assert store.count(dummies, 1, seats=SEATS).receipted == first.receipted


@pytest.mark.parametrize("seed", range(4))
def test_the_same_fragments_count_in_any_batches(store: Store, seed: int) -> None:
    """Free and full blocks, dummies, late ones, repeated ones and losers that come again."""
    generator = random.Random(seed)
    made = [
        fragment(number, generator.randrange(3), generator.choice((1, 2, 2, 2, 2)), dummy=number % 5 == 0)
        for number in range(40)
    ]
    messages = [generator.choice(made) for _ in range(120)]
    outcomes = []
    for size in (1, 7, len(messages)):
        taken = [
            store.count(messages[start : start + size], 2, seats=SEATS)
            for start in range(0, len(messages), size)
        ]
        known = {bytes(row["id"]) for row in store.database.execute("SELECT id FROM fragments")}
        receipted = {identity for part in taken for identity in (*part.fresh, *part.repeated)}
        assert known <= receipted, "whoever has a seat has a receipt"
        (sums,) = store.sums(2)
        totals = {at: (count, total.tolist()) for at, (count, total) in sums.items()}
        assert {at: count for at, (count, _) in totals.items()} == store.counts(2)
        outcomes.append((known, totals, sum(part.late for part in taken)))
        forget(store)
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_each_message_of_a_batch_is_told_what_became_of_it(store: Store) -> None:
    """Nobody is forgotten and nobody is counted twice, in a block whose seats are contested."""
    generator = random.Random(3)
    made = [fragment(number, dummy=number % 4 == 0) for number in range(12)]
    for _ in range(20):
        messages = [generator.choice(made) for _ in range(9)]
        before = set(store.counts(1).items())
        taken = store.count(messages, 1, seats=SEATS)
        told = len(taken.fresh) + len(taken.repeated) + len(taken.dummies) + taken.unseated + taken.spent
        gone = told - len(messages)
        assert gone >= 0
        assert gone == 0 or before == {(0, SEATS)}, "who lost a seat that was taken before is one more"


def test_with_tokens_as_many_count_as_come_and_no_values_are_kept(store: Store) -> None:
    fragments = [fragment(1 << number) for number in range(3 * SEATS)]
    counted = store.count(fragments, 1, seats=None, keeps_values=False)
    assert (len(counted.fresh), counted.unseated) == (3 * SEATS, 0)
    assert held(store) == (1 << 3 * SEATS) - 1
    (kept,) = store.database.execute("SELECT kept FROM partial_sums").fetchone()
    assert kept is None
    assert not store.keeps_values_of(1)
    with pytest.raises(StorageError, match="cannot be dealt to groups"):
        store.sums(1, groups=3)


@pytest.mark.parametrize("largest", [127, 128, 32_767, 32_768, 2**31 - 1, 2**31, 2**33])
def test_values_of_any_size_are_summed_exactly(store: Store, largest: int) -> None:
    store.count([fragment(largest), fragment(-largest), fragment(-largest)], 1, seats=SEATS)
    assert held(store) == -largest
