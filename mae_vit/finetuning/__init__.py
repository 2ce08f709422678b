"""Fine-tunes encoders, or scores their frozen features."""
