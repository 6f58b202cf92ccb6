"""Where the coordinator's state is: SQLite in its state directory, or PostgreSQL, behind one interface."""
