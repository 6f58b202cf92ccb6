"""The records of a simulated fleet: their source, the held-out part, and the device of each."""
