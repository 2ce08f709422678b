"""The networks of fine-tuning."""
