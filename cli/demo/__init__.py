"""``dpagent demo``: a whole fleet on one machine, of the same programs and messages as a real one."""
