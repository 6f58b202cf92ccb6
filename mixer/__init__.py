"""The program that mixes sealed fragments on their way: takes a batch, permutes it, publishes it."""
