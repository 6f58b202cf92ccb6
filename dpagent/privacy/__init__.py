"""Differential privacy: mechanisms, their events, and what these cost.

A device samples a lot (:mod:`~dpagent.privacy.sampling`), constrains each record's gradient to integers
of bounded norm (:mod:`~dpagent.privacy.mechanisms.grid`), adds exact integer noise by one of the
mechanisms, and rounds the noisy sum for the wire (:mod:`~dpagent.privacy.mechanisms.wire`). A mechanism
states an event (:mod:`~dpagent.privacy.events`), which an accountant prices
(:mod:`~dpagent.privacy.accounting.choice` says which one). A job is planned in
:mod:`~dpagent.privacy.calibration` on one of the :mod:`~dpagent.privacy.schedules`, charges that are
chosen as one goes are limited by :mod:`~dpagent.privacy.accounting.filters`, and figures are told in one
form, :mod:`~dpagent.privacy.statement`. Needs numpy and nothing else. ``docs/privacy.md`` says which
module and which test stands for each guarantee.

``noise`` draws integers, ``accounting`` prices events, ``mechanisms`` has one file a mechanism; events,
schedules and planning are beside them. Import each name from the module that defines it: a board then
loads the code that it runs, and no more.
"""
