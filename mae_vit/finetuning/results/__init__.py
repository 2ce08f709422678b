"""The results of fine-tuning."""
