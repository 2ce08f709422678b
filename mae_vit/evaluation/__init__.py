"""What frozen features are worth: closed-form classifiers, no training."""
