"""A part's result file: JSON lines that are appended one by one, so that a run cut short loses one figure."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mae_vit.core.files import read_json_lines, to_json

ROOT = Path(__file__).resolve().parents[2]
# The key of lines that say what machine and versions the following ones hold for.
ENVIRONMENT = "environment"
FAILED = "failed"
# Whose bytes decide what is measured.
_SOURCES = (
    "mae_vit/**/*.py",
    "pretrain/*.py",
    "benchmarks/**/*.py",
    "configs/*.yaml",
    "tests/**/test_gpu*.py",
)


@dataclass(frozen=True)
class Identity:
    """What a figure holds for; figures of another identity are measured anew.

    Attributes:
        commit: of the sources; None where nobody knows.
        sources: digest of the sources, which also tells changes that are not committed.
        device: name of the GPU or processor.
        tiny: figures of tiny sizes say that a part works, and nothing about speed.
    """

    commit: str | None
    sources: str
    device: str
    tiny: bool

    def matches(self, line: dict[str, Any]) -> bool:
        """Whether a line was measured with the same sources, device and sizes."""
        return (line["sources"], line["device"], line["tiny"]) == (self.sources, self.device, self.tiny)


class Lines:
    """The file of one part."""

    def __init__(self, folder: Path, part: str, identity: Identity) -> None:
        """Names the file; nothing is written yet."""
        self.path, self.part, self.identity = folder / f"{part}.jsonl", part, identity

    def known(self) -> set[str]:
        """Keys of the figures that are there; those that failed are not."""
        return {line["key"] for line in self._read() if FAILED not in line}

    def append(self, key: str, values: dict[str, Any]) -> None:
        """Adds a line and forces it to the disk."""
        described = {"part": self.part, "key": key, "tiny": self.identity.tiny}
        source = {"commit": self.identity.commit, "sources": self.identity.sources}
        place = {"device": self.identity.device, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            # A line that an abrupt end cut short ends here.
            torn = file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
            text = to_json({**described, **values, **source, **place}) + "\n"
            file.write((b"\n" if torn else b"") + text.encode())
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.path) if self.identity.matches(line)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, in order; empty where there is no file."""
    return [line for line in read_json_lines(path) if "key" in line] if path.exists() else []


def digest_sources() -> str:
    """Twelve hexadecimal digits over all files that decide what is measured."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in ROOT.glob(pattern)):
        digest.update(json.dumps(path.relative_to(ROOT).as_posix()).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
