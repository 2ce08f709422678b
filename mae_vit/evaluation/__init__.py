"""Evaluates frozen features: closed-form classifiers, and one trained linear layer."""
