"""`dpagent serve`: answers of the board's model for the board's other programs."""
