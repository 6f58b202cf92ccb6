"""The program that runs rounds: announces, counts, sums, steps the model, keeps accounts."""
