"""Training on a device: engines that sum clipped per-record gradients, lots, augmentation, the optimiser."""
