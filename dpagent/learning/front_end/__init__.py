"""Frozen features before the trainable layers."""
