"""What frozen features are worth: classifiers in closed form, and one linear layer."""
