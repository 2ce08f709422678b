"""What small pretraining runs of tests share."""

from commands import SMALL_MAE

SMALL = [
    *SMALL_MAE,
    "train.steps=6",
    "train.warmup_steps=1",
    "monitor.log_every_steps=1",
    "monitor.evaluate_every_steps=3",
    "monitor.evaluate_images=32",
    "monitor.tensorboard=false",
    "checkpoint.every_steps=2",
]
