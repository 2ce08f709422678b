"""Optimizers, parameter groups, learning-rate schedule and loss scale."""
