"""The fleet's page: jobs, rounds, accuracy and budget, live, and orders to the queue; and its metrics."""
