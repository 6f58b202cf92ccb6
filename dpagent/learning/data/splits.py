"""Splits of one dataset over the devices of an experiment. Real fleets' data are never in one place.

Every record goes to exactly one part, and no part is empty. The same seed gives the same parts.

* ``iid``: dealt at random.
* ``dirichlet``: of each class, the parts get shares drawn from a symmetric Dirichlet distribution, small
  ``alpha`` for skewed ones (Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural
  Networks", ICML 2019; Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022). Hsu et al.,
  "Measuring the Effects of Non-Identical Data Distribution" (2019), draw the other way round, a
  distribution over classes for each device, which cannot in general deal out all records.
* ``class``: sorted by label, cut into shards, each part gets as many (McMahan et al.,
  "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017).
* ``file``: records from one file, person or session stay together; sizes are as even as that allows.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError, ParameterError, require_between, require_count
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.derived import Subset
from dpagent.wording import counted, named

How = Literal["iid", "dirichlet", "class", "file"]

_DRAWS: Final = 100


def split(
    dataset: Dataset,
    parts: int,
    how: How = "iid",
    *,
    seed: int,
    alpha: float = 0.5,
    classes_per_part: int = 2,
) -> list[Subset]:
    """Deal the records into parts, read through ``dataset``; see the module.

    Args:
        dataset: the records.
        parts: how many.
        how: ``iid``, ``dirichlet``, ``class`` or ``file``.
        seed: of the split, never of noise.
        alpha: ``dirichlet``: the concentration, in [0.001, 1e6].
        classes_per_part: ``class``: shards for each part.

    Raises:
        DataError: there would be an empty part; the text proposes a change.
        ParameterError: a number is out of its range.

    >>> from dpagent.learning.data.dataset import ArrayDataset
    >>> data = ArrayDataset(np.zeros((10, 3), np.float32), np.arange(10) % 2, 2)
    >>> [len(part) for part in split(data, 3, seed=1)]
    [4, 3, 3]
    >>> [part.labels.tolist() for part in split(data, 2, "class", seed=1, classes_per_part=1)]
    [[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
    """
    require_count("parts", parts)
    generator = np.random.Generator(np.random.PCG64(require_count("seed", seed, minimum=0)))
    if parts > len(dataset):
        raise DataError(
            f"{counted(len(dataset), 'record')} cannot be split into {counted(parts, 'part')}; expected at "
            "most one part a record."
        )
    match how:
        case "iid":
            indices = np.array_split(generator.permutation(len(dataset)), parts)
        case "dirichlet":
            indices = _dirichlet(dataset, parts, require_between("alpha", alpha, 1e-3, 1e6), generator)
        case "class":
            indices = _by_class(
                dataset, parts, require_count("classes_per_part", classes_per_part), generator
            )
        case "file":
            indices = _by_file(dataset, parts, generator)
        case _:
            raise ParameterError(f"how is {how!r}; expected one of {', '.join(get_args(How))}.")
    return [Subset(dataset, mine) for mine in indices]


def _dirichlet(
    dataset: Dataset, parts: int, alpha: float, generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    by_class = [np.flatnonzero(dataset.labels == number) for number in np.unique(dataset.labels)]
    for _ in range(_DRAWS):
        dealt: list[list[NDArray[np.int64]]] = [[] for _ in range(parts)]
        for members in by_class:
            shares = generator.dirichlet(np.full(parts, alpha))
            cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
            for part, mine in zip(dealt, np.split(generator.permutation(members), cuts), strict=True):
                part.append(mine)
        made = [np.concatenate(part) for part in dealt]
        if min(map(len, made)):
            return made
    raise DataError(
        f"A Dirichlet split of {counted(len(dataset), 'record')} with alpha {alpha:g} left one of "
        f"{counted(parts, 'part')} empty in each of {_DRAWS} draws. Use a larger alpha or fewer parts."
    )


def _by_class(
    dataset: Dataset, parts: int, shards_each: int, generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    count = parts * shards_each
    if count > len(dataset):
        raise DataError(
            f"{counted(len(dataset), 'record')} cannot be cut into {parts} × "
            f"{counted(shards_each, 'shard')}; use fewer parts or classes for each part."
        )
    # Shuffled first, so that which of a class go together is random too.
    order = generator.permutation(len(dataset))
    shards = np.array_split(order[np.argsort(dataset.labels[order], kind="stable")], count)
    dealt = generator.permutation(count).reshape(parts, shards_each)
    return [np.concatenate([shards[number] for number in mine]) for mine in dealt]


def _by_file(dataset: Dataset, parts: int, generator: np.random.Generator) -> list[NDArray[np.int64]]:
    if dataset.groups is None:
        raise DataError(
            "These records do not tell which file they are from; use"
            f" {named('split', 'iid')}, or CSV files or {named('group')}."
        )
    groups, codes, sizes = np.unique(dataset.groups, return_inverse=True, return_counts=True)
    if len(groups) < parts:
        raise DataError(
            f"There are {counted(len(groups), 'file')} or groups for {counted(parts, 'part')}; use at most "
            f"{counted(len(groups), 'part')}."
        )
    # The largest first, each to the part that has least; in random order among equals.
    order = generator.permutation(len(groups))
    owner, load = np.empty(len(groups), np.int64), np.zeros(parts, np.int64)
    for group in order[np.argsort(-sizes[order], kind="stable")]:
        owner[group] = load.argmin()
        load[owner[group]] += sizes[group]
    return [np.flatnonzero(owner[codes] == number) for number in range(parts)]
