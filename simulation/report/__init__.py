"""The report of a run: one HTML page with its pictures in it, to be read, sent on or printed.

Every sentence on the page is drawn from the :class:`~simulation.record.RunRecord`. The page
fetches nothing: style and pictures are inline, there are no scripts, and its content security
policy forbids the rest. Equal records give equal pages, to the byte.
"""
