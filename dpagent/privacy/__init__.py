"""Differential privacy: mechanisms, their events and their privacy costs.

A device samples a lot (:mod:`~dpagent.privacy.sampling`), constrains each record's gradient to integers
of bounded norm (:mod:`~dpagent.privacy.mechanisms.grid`), adds exact integer noise by one of the
mechanisms, and rounds the noisy sum for the wire (:mod:`~dpagent.privacy.mechanisms.wire`). A mechanism
states an event (:mod:`~dpagent.privacy.events`), which an accountant prices
(:mod:`~dpagent.privacy.accounting.choice` selects it). :mod:`~dpagent.privacy.calibration` plans a job
on one of the :mod:`~dpagent.privacy.schedules`, :mod:`~dpagent.privacy.accounting.filters` limits
adaptively chosen charges, and every figure is a :mod:`~dpagent.privacy.statement`. The package needs only
numpy. ``docs/privacy.md`` lists the module and the tests for each guarantee.

``noise`` draws integers, ``accounting`` prices events, ``mechanisms`` has one file per mechanism; events,
schedules and planning are next to them. Import each name from the module that defines it, so that a board
loads only the code that it runs.
"""
