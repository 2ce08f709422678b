"""Fine-tunes and compares encoders; `run.py` is the command."""
