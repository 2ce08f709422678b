"""Evaluation of frozen features: classifiers in closed form, and one linear layer."""
