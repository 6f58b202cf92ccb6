"""The records of a simulated fleet: where they are from, what is held out, and who gets which."""
