"""Mechanisms, one file each: the clipping and quantizing of records, the noise, and its cost."""
