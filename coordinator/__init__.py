"""The program that runs rounds: announces plans, counts fragments, sums, steps the model, keeps accounts."""
