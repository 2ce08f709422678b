"""A matrix of fine-tuning runs, and one page with its results."""
