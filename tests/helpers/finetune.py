"""Settings of short fine-tuning runs."""

# An encoder of 8x8 gray images.
TINY = [
    *("model.img_size=8", "model.patch_size=2", "model.in_chans=1", "model.embed_dim=16", "model.depth=2"),
    "model.num_heads=2",
]
SMALL = [
    *("data.augment.flip=false", "train.effective_batch_size=64", "train.steps=6", "train.warmup_steps=1"),
    *("optim.lr=3e-3", "monitor.log_every_steps=1", "monitor.evaluate_every_steps=2"),
    *("monitor.tensorboard=false", "checkpoint.every_steps=2", "checkpoint.keep_last=9"),
]
# A network that is none of ours, for the same images.
CNN = {"config": "simple_cnn_cifar", "model": ["model.img_size=8", "model.in_chans=1"]}
