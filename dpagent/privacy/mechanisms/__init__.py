"""Mechanisms, one file each: how records become bounded integers, which noise is added, what it costs."""
