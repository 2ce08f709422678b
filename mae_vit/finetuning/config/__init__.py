"""The config of fine-tuning."""
