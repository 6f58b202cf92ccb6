"""``dpagent bench``: training speed and memory on this board."""
