"""The training loop, its engines, checkpoints, run folder and monitor."""
