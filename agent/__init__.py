"""The program on the device: samples, clips, perturbs, charges its ledger, publishes."""
