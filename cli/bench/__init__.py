"""``dpagent bench``: how fast this board trains, and in how much memory."""
