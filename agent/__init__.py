"""The program on the device: samples, clips, adds noise, charges its ledger, publishes."""
