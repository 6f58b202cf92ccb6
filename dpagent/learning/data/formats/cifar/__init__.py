"""CIFAR in binary form as a data format."""
