"""The programs of a simulated fleet: supervisor, configurations, broker and baseline."""
