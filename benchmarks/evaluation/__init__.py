"""What pretraining learns: bands against RGB, measures without labels."""
