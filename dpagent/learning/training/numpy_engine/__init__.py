"""Clipped sums of per-example gradients with numpy alone: fast, small, and the same bits in any company.

A network is compiled for a fixed number of records into stages, which are bound to their memory once:
nothing large is allocated afterwards, and every call computes the same shapes, blank records included.
From the outside in:

* ``engine.py``: lots in, clipped sums out; norms and clip factors;
* ``network.py``: from the layers of a model to a row of stages;
* ``convolution.py``, ``dense.py``: layers with parameters, which know each record's gradient by them;
* ``pooling.py``, ``average_pooling.py``, ``activations.py``, ``normalisation.py``, ``residual.py`` and
  ``loss.py``: the rest;
* ``gathering.py``, ``products.py``, ``power_sums.py``, ``workspaces.py``: windows as matrices, matrix
  products, what norms are made of, memory.

What the proof in :mod:`dpagent.learning.training.engine` asks for is kept so:

* **Batch invariance.** Matrix products run record by record, or in a form that was tried on this machine
  (``products.py``). All else is arithmetic number by number, which does not depend on a number's place in a
  vector because every record begins on a cache line and takes whole vectors (``workspaces.py``), or
  sums within one record, all of one shape. :meth:`NumpyEngine.is_batch_invariant` tries the whole of it.
* **Short sums.** Float32 holds sums over one microbatch at most, and squares or magnitudes in runs of at
  most ``NORM_RUN`` numbers (``power_sums.py``, ``dense.py``).
* **Exclusion.** The gradients of a record that is not finite are overwritten with zeros before anything is
  added. That costs a microsecond more; all other work is the same for all data, as far as
  the processor's own arithmetic is.

One thread of the BLAS is best (``OPENBLAS_NUM_THREADS=1``): other cores take microbatches of their own
(:mod:`~dpagent.learning.training.parallel_engine`).
"""
