"""Counter-based randomness: a number is a pure function of its purpose.

Nothing random in this project depends on who computes it. Every draw is Threefry-2x32-20 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011) of (seed, stream, epoch, sample index, draw): additions, rotations and
exclusive-ors on 32-bit words, hence bit-equal in NumPy and in torch on any device, whatever the batch, worker or rank.

Words are uint32 in NumPy (which wraps by itself) and int64 below 2**32 in torch (which lacks full unsigned arithmetic).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

# Never change it: it decides which samples a subset takes.
SUBSET_HASH = b"mae-vit subset"


def hash_key(key: str, salt: bytes) -> bytes:
    """Returns the hash that orders a key in a draw; `salt` names the draw."""
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16, key=salt).digest()


Words = TypeVar("Words", np.ndarray, Tensor)
MASK32 = 0xFFFFFFFF
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA
MAX_INDEX = 2**32


class RngStream(IntEnum):
    """The purpose of a random number. Values are part of the data format: never renumber."""

    ORDER = 0
    CROP = 1
    FLIP = 2
    MASK = 3
    CORRUPT_KIND = 4
    CORRUPT_SOURCE = 5
    PREPARE = 6
    FEW_SHOT = 7
    NOISE = 8
    POLICY = 9
    ERASE = 10
    ERASE_NOISE = 11
    MIX = 12
    PLUGIN = 13  # of objectives of the user's own; their policies draw from POLICY


def threefry2x32(key: tuple[Words | int, Words | int], x0: Words, x1: Words) -> tuple[Words, Words]:
    """Threefry-2x32 with 20 rounds: two 32-bit key words, two counters (NumPy uint32 or torch int64) that broadcast."""
    k0, k1 = key
    schedule = (k0, k1, k0 ^ k1 ^ _PARITY)
    if isinstance(x0, Tensor):
        return _rounds_of_tensors(schedule, x0, x1)
    # In place: a new array for each of 260 operations takes twice as long. NumPy's words wrap by themselves.
    x0, x1 = (np.array(words, np.uint32, order="C") for words in np.broadcast_arrays(x0, x1, k0, k1)[:2])
    rotated = np.empty_like(x1)
    x0 += np.asarray(k0, np.uint32)
    x1 += np.asarray(k1, np.uint32)
    for group in range(5):
        for rotation in _ROTATIONS[:4] if group % 2 == 0 else _ROTATIONS[4:]:
            x0 += x1
            np.left_shift(x1, rotation, out=rotated)
            x1 >>= 32 - rotation
            x1 |= rotated
            x1 ^= x0
        x0 += np.asarray(schedule[(group + 1) % 3], np.uint32)
        x1 += np.asarray(schedule[(group + 2) % 3], np.uint32)
        x1 += np.uint32(group + 1)
    return x0, x1


def _rounds_of_tensors(schedule: tuple[Tensor | int, ...], x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """Torch version with five operations a round, because a GPU launches a kernel for each.

    The low 32 bits of sums and exclusive-ors do not depend on higher bits, so x0 is cut to 32 bits once, at the end: it
    stays below 2**37. A word times 2**rotation stays below 2**62.
    """
    x0, x1 = torch.broadcast_tensors(x0, x1)
    x0 = x0 + schedule[0]
    x1 = (x1 + schedule[1]).bitwise_and_(MASK32)
    for group in range(5):
        for rotation in _ROTATIONS[:4] if group % 2 == 0 else _ROTATIONS[4:]:
            x0 += x1
            rotated = (x1 >> (32 - rotation)).add_(x1, alpha=1 << rotation)
            x1 = rotated.bitwise_xor_(x0).bitwise_and_(MASK32)
        x0 += schedule[(group + 1) % 3]
        x1 = x1.add_(schedule[(group + 2) % 3] + (group + 1)).bitwise_and_(MASK32)
    return x0.bitwise_and_(MASK32), x1


# Cached: each draw of a batch asks for one of a few keys per epoch, which cost 20 rounds on NumPy scalars.
@lru_cache(maxsize=256)
def derive_key(seed: int, stream: RngStream, epoch: int) -> tuple[int, int]:
    """Returns the key of one stream in one epoch; 0 <= seed < 2**64, 0 <= epoch < 2**32."""
    k0, k1 = threefry2x32(
        (seed & MASK32, (seed >> 32) & MASK32),
        np.array([int(stream)], np.uint32),
        np.array([epoch & MASK32], np.uint32),
    )
    return int(k0[0]), int(k1[0])


def random_uint32(key: tuple[Words | int, Words | int], index: Words, draws: int) -> tuple[Words, Words]:
    """Draws words for each sample index (B,): two arrays (B, draws), NumPy uint32, or torch int64 on its device."""
    if isinstance(index, Tensor):
        return threefry2x32(key, index.to(torch.int64)[:, None], torch.arange(draws, device=index.device))
    return threefry2x32(key, index.astype(np.uint32)[:, None], np.arange(draws, dtype=np.uint32))


def noise_seed(seed: int, rank: int, step: int, micro_batch: int) -> int:
    """Seeds the framework's generator for noise inside layers (dropout, drop-path); rank < 2**12, micro_batch < 2**20.

    Such noise depends on the split over ranks: a resumed run is exact only with the same world size.
    """
    k0, k1 = derive_key(seed, RngStream.NOISE, step)
    k0, k1 = derive_key(k1 << 32 | k0, RngStream.NOISE, rank << 20 | micro_batch)
    return (k1 << 32 | k0) >> 1


@dataclass(frozen=True)
class ViewKeys:
    """The keys of draws in NumPy, `index` int64 (B,) under a seed in an epoch: for views, which the CPU draws."""

    seed: int
    epoch: int
    index: np.ndarray

    def random_uint32(self, stream: RngStream, draws: int) -> np.ndarray:
        """Draws one 32-bit word for each counter: uint32 (B, draws)."""
        return random_uint32(derive_key(self.seed, stream, self.epoch), self.index, draws)[0]

    def uniform(self, stream: RngStream, draws: int) -> np.ndarray:
        """Returns float64 numbers in [0, 1) with 53 random bits, (B, draws).

        NumPy only: draws that need floating point (crop boxes) run on the CPU, since logarithms and roots differ by
        device.
        """
        high, low = random_uint32(derive_key(self.seed, stream, self.epoch), self.index, draws)
        return ((high >> 5) * 67108864.0 + (low >> 6)) * (1.0 / 9007199254740992.0)


@dataclass(frozen=True)
class SampleKeys:
    """The keys of draws: one epoch's sample indices under a seed.

    Attributes:
        seed: the run's seed.
        epoch: epoch of the samples.
        index: int64 (B,) sample indices, on the device that computes.
        epoch_input: the epoch as int64 () on the same device, for compiled graphs (`for_compiled`).
    """

    seed: int
    epoch: int
    index: Tensor
    epoch_input: Tensor | None = None

    def for_compiled(self) -> SampleKeys:
        """Returns the same keys for a compiled graph: a plain number would recompile it for each epoch."""
        return replace(self, epoch_input=torch.full_like(self.index[0], self.epoch))

    def random_uint32(self, stream: RngStream, draws: int) -> Tensor:
        """Draws one 32-bit word for each counter: int64 (B, draws)."""
        return random_uint32(self._key(stream), self.index, draws)[0]

    def random_uint32_of_each(self, streams: Sequence[RngStream], draws: int) -> Tensor:
        """Draws the words of several streams at once: int64 (S, B, draws)."""
        keys = [self._key(stream) for stream in streams]
        # Filled in by the device: to copy numbers from the host would block.
        scalars = [
            [torch.full_like(self.index[0], word) if isinstance(word, int) else word for word in key]
            for key in keys
        ]
        k0, k1 = (torch.stack(half)[:, None, None] for half in zip(*scalars, strict=True))
        return random_uint32((k0, k1), self.index, draws)[0]

    def _key(self, stream: RngStream) -> tuple[Tensor | int, Tensor | int]:
        """Returns the result of `derive_key`; in a compiled graph, scalars on the device."""
        if not torch.compiler.is_compiling():
            return derive_key(self.seed, stream, self.epoch)
        if self.epoch_input is None:
            # Not `torch.compiler.disable`: it imports the whole compiler, and data workers import this module.
            raise RuntimeError("a compiled graph takes keys.for_compiled()")
        # The same words as from `derive_key`; the compiler fuses their hundred operations.
        seed = (self.seed & MASK32, (self.seed >> 32) & MASK32)
        return threefry2x32(seed, torch.full_like(self.epoch_input, int(stream)), self.epoch_input)
