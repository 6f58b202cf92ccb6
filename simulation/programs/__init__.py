"""The programs of a simulated fleet: what starts them, what they are told, and those that are only here."""
