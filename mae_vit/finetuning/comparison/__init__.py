"""A matrix of fine-tuning runs, run to the end and told on one page."""
