"""What makes a release private, and what it costs.

A device samples a lot (:mod:`~dpagent.privacy.sampling`), constrains each record's gradient to
integers of bounded norm (:mod:`~dpagent.privacy.mechanisms.grid`), adds exact integer noise by one of the
mechanisms, and rounds the result for the wire (:mod:`~dpagent.privacy.mechanisms.wire`). The cost is
accounted for by :mod:`~dpagent.privacy.accounting.pld` (tight) or :mod:`~dpagent.privacy.accounting.rdp`
(Rényi), planned ahead in :mod:`~dpagent.privacy.calibration` on one of the :mod:`~dpagent.privacy.schedules`,
held in by :mod:`~dpagent.privacy.accounting.filters` where charges are chosen as one goes, and told in one
form, :mod:`~dpagent.privacy.statement`. Needs numpy and nothing else. ``docs/privacy.md`` says which module
and which test stands for each guarantee.

``noise`` draws integers, ``accounting`` prices releases, ``mechanisms`` has one file a mechanism; the records
that they share, schedules and planning are beside them. Import each name from the module that defines it: a
board then loads what it runs, and no more.
"""
