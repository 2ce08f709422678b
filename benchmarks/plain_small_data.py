"""The small-data experiment in plain PyTorch: what our runner's numbers are checked against.

Imports nothing of ours. Scratch ViT-Tiny, SimpleCNN and SmallResNet on 500 images of each CIFAR-10
class, the same images as `data.labels_per_class=500` and `finetune.holdout=0.1` take; 30 epochs of
batch 128, AdamW (rate 1e-3, decay 0.01), linear warm-up then cosine, label smoothing 0.1, crop of
the image padded by 4 px, flip; the epoch of the best held-out accuracy, then all test images, once.

    python benchmarks/plain_small_data.py data/cifar10
"""

import copy
import hashlib
import io
import json
import math
import sys
import tarfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

EPOCHS, BATCH, RATE, DECAY, SMOOTHING = 30, 128, 1e-3, 0.01, 0.1
WARMUP_EPOCHS = {"vit": 5, "cnn": 3, "resnet": 3}


class ViT(nn.Module):
    """32 px, patch 4, width 128, 6 blocks, 4 heads, [CLS], learnable positions; MAE's initialization."""

    def __init__(self):  # noqa: D107
        super().__init__()
        self.patches = nn.Conv2d(3, 128, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, 128))
        self.positions = nn.Parameter(torch.zeros(1, 65, 128))
        block = nn.TransformerEncoderLayer(128, 4, 512, 0.0, F.gelu, 1e-6, batch_first=True, norm_first=True)
        norm = nn.LayerNorm(128, 1e-6)
        self.blocks = nn.TransformerEncoder(block, 6, norm, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)
        for parameter in (self.cls, self.positions):
            nn.init.trunc_normal_(parameter, std=0.02)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim in (2, 4):  # The patches' weights as the matrix that they are (MAE's code).
                nn.init.xavier_uniform_(parameter.view(len(parameter), -1))
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        """(B, 3, 32, 32) -> (B, 10)."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.blocks(x)[:, 0])


def cnn():
    """SimpleCNN, 141,354 parameters."""

    def conv(before, after):
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    return nn.Sequential(
        *conv(3, 32), *conv(32, 32), nn.MaxPool2d(2), *conv(32, 64), *conv(64, 64), nn.MaxPool2d(2),
        *conv(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


class Block(nn.Module):
    """A basic block of SmallResNet."""

    def __init__(self, before, after, stride):  # noqa: D107
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        same = stride == 1 and before == after
        shortcut = [nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)]
        self.shortcut = nn.Identity() if same else nn.Sequential(*shortcut)

    def forward(self, x):
        """(B, C, H, W) -> (B, C', H', W')."""
        return F.relu(self.body(x) + self.shortcut(x))


def resnet():
    """SmallResNet, 175,258 parameters."""
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    sizes = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    blocks = [Block(*size) for size in sizes]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


# With the number of their parameters.
MODELS = {"vit": (ViT, 1_205_898), "cnn": (cnn, 141_354), "resnet": (resnet, 175_258)}


def read(folder, split):
    """Images uint8 (N, 3, 32, 32), labels and keys of a split, from its tars."""
    images, labels, keys = [], [], []
    for path in sorted(folder.glob(f"{split}-*.tar")):
        members = {}
        with tarfile.open(path) as tar:
            for member in tar:
                members[member.name] = tar.extractfile(member).read()
        for name in members:
            key, _, kind = name.rpartition(".")
            if kind != "cls":
                keys.append(key)
                images.append(np.array(Image.open(io.BytesIO(members[name])).convert("RGB")))
                labels.append(int(members[f"{key}.cls"]))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels), keys


def draw(places, labels, keys, count, salt):
    """The `count` images of each class with the smallest hashes of their keys; and the others."""

    def rank(place):
        return hashlib.blake2b(keys[place].encode(), digest_size=16, key=salt).digest(), keys[place]

    taken = []
    for label in range(10):
        taken += sorted((place for place in places if labels[place] == label), key=rank)[:count]
    return sorted(taken), sorted(set(places) - set(taken))


def subset(labels, keys, per_class=500, held_out=50):
    """Places of the labeled images that are trained on, and of those that are held out."""
    taken, _ = draw(range(len(keys)), labels.tolist(), keys, per_class, b"mae-vit subset")
    held, trained = draw(taken, labels.tolist(), keys, held_out, b"mae-vit finetune holdout")
    return trained, held


def augment(images, generator):
    """Pads by 4 px of black, cuts 32 x 32, mirrors half of them."""
    padded = F.pad(images, (4, 4, 4, 4))
    tops = torch.randint(0, 9, (2, len(images)), generator=generator).tolist()
    cut = torch.stack(
        [padded[i, :, y : y + 32, x : x + 32] for i, (y, x) in enumerate(zip(*tops, strict=True))]
    )
    mirrored = torch.rand(len(cut), generator=generator) < 0.5
    return torch.where(mirrored[:, None, None, None], cut.flip(3), cut)


@torch.no_grad()
def accuracy(model, images, labels):
    """Share of images that are found."""
    model.eval()
    correct = [
        (model(x).argmax(1) == y).sum() for x, y in zip(images.split(500), labels.split(500), strict=True)
    ]
    model.train()
    return float(sum(correct) / len(labels))


def train(name, seed, data):
    """Trains one network; returns its accuracies."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    make, parameters = MODELS[name]
    model = make()
    assert sum(p.numel() for p in model.parameters()) == parameters
    images, labels = data["train"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    per_epoch = len(images) // BATCH
    total, warmup, step, best, kept = EPOCHS * per_epoch, WARMUP_EPOCHS[name] * per_epoch, 0, -1.0, None
    for _ in range(EPOCHS):
        order = torch.randperm(len(images), generator=generator)
        for batch in order[: per_epoch * BATCH].split(BATCH):
            step += 1
            cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
            share = step / warmup if step <= warmup else cosine
            for group in optimizer.param_groups:
                group["lr"] = RATE * share
            x = data["normalize"](augment(images[batch], generator))
            loss = F.cross_entropy(model(x), labels[batch], label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        held_out = accuracy(model, *data["held_out"])
        if held_out > best:
            best, kept = held_out, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    known, test = accuracy(model, data["normalize"](images), labels), accuracy(model, *data["test"])
    return {"model": name, "seed": seed, "train": known, "held_out": best, "test": test}


def main(folder):
    """Runs all and prints a line of JSON for each."""
    images, labels, keys = read(folder, "train")
    pixels = images.float() / 255
    mean, std = (f(dim=(0, 2, 3)).view(3, 1, 1) for f in (pixels.mean, pixels.std))

    def normalize(some):
        return (some.float() / 255 - mean) / std

    trained, held_out = subset(labels, keys)
    test_images, test_labels, _ = read(folder, "test")
    data = {
        "train": (images[trained], labels[trained]),
        "held_out": (normalize(images[held_out]), labels[held_out]),
        "test": (normalize(test_images), test_labels),
        "normalize": normalize,
    }
    for name in MODELS:
        for seed in range(3):
            print(json.dumps(train(name, seed, data)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
