"""Random configs: each is one readable line, or a config of which all numbers make sense."""

import io
import math
import random
import time

import pytest
from helpers.commands import ROOT
from ruamel.yaml import YAML

from mae_vit.config.load import dump_config, load_config
from mae_vit.config.plan import make_plan
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.setup import build_objective

SHIPPED = [
    *sorted(ROOT.glob("configs/pretrain/ma*.yaml")),
    *sorted(ROOT.glob("configs/finetune/finetune_*.yaml")),
]
VALUES = [
    *(None, True, False, 0, -1, 1, 2, 7, 3.5, -0.5, 1e-3, 1e30, 10**30, -(10**30)),
    *(math.nan, math.inf, -math.inf, "", "x", "1e-3", "null", "../..", "a" * 5000, "\x00", "\u202e"),
    *([], [1], [0.9, 0.95], [[0.5], [0.2]], [None], [[[[]]]], {}, {"name": "mae"}, {"x": {"y": 1}}),
]
LINES = [
    '!!python/object/apply:os.system ["echo no > {mark}"]',
    'model: !!python/name:os.system ""',
    "a: &a [*a]",
    "a: &a {<<: *a}",
    "x: &x [1, 1]\ny: &y [*x, *x]\nz: [*y, *y]",
    "[" * 3000,
    "model: {" * 200,
    "\t- tab",
    "optim: 1",
    "train: []",
    "run: {name: 'a b'}",
    "? [complex, key]\n: 1",
    "%YAML 9.9",
    "---\n---",
    "\ufeff",
    "é: ü",
    "data: {path: [1]}",
]
TOKENS = [*":-{}[]'\"#|>%\t\n0", "&a", "*a", "  ", "nan", ".inf"]
SECONDS = 10


def mutate_text(text: str, chance: random.Random, mark) -> str:
    """Changes letters or lines."""
    for _ in range(chance.choice([1, 1, 2, 5])):
        text = _mutate_letters(text, chance) if chance.random() < 0.5 else _mutate_lines(text, chance, mark)
    return text


def _mutate_letters(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text) + 1)
    added = chance.choice([*TOKENS, *map(chr, (0, 7, 127, 255, 0x1F600)), ""])
    removed = 0 if added else chance.randrange(1, 9)
    return text[:at] + added + text[at + removed :]


def _mutate_lines(text: str, chance: random.Random, mark) -> str:
    lines = text.splitlines(keepends=True) or ["\n"]
    at, way = chance.randrange(len(lines)), chance.randrange(4)
    if way == 0:
        del lines[at]
    elif way == 1:
        lines.append(lines[at])
    elif way == 2:
        lines[at] = " " * chance.randrange(5) + lines[at].lstrip()
    else:
        lines.append("\n" + chance.choice(LINES).replace("{mark}", str(mark)) + "\n")
    return "".join(lines)


def mutate_values(text: str, chance: random.Random) -> str:
    """Gives some keys other values, or other keys the values."""
    raw = YAML(typ="safe", pure=True).load(text)
    for _ in range(chance.choice([1, 1, 1, 3])):
        section = raw.get(chance.choice(list(raw)))
        if not isinstance(section, dict) or not section:
            continue
        key = chance.choice(list(section))
        if chance.random() < 0.15:
            section[f"{key}{chance.choice('sx_')}"] = section.pop(key)
        else:
            section[key] = chance.choice(VALUES)
    stream = io.StringIO()
    YAML(typ="safe", pure=True).dump(raw, stream)
    return stream.getvalue()


def numbers_of(value):
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from numbers_of(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def take(path, schema, folder) -> bool:
    """Goes as far as a run does before it looks at data; returns whether it was taken."""
    config = load_config(schema, path)
    assert all(math.isfinite(number) for number in numbers_of(config.model_dump()))
    again = folder / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(schema, again) == config
    plan = make_plan(config, num_samples=10**7, world_size=1)
    assert 0 < plan.total_steps < 2**53
    assert 0 <= plan.warmup_steps <= plan.total_steps
    assert plan.lr > 0
    if schema is PretrainConfig:
        geometry, half = config.model.geometry(), (0.5,) * config.model.channels
        if config.model.name == "tiny-cifar" and geometry.depth <= 12 and geometry.embed_dim <= 512:
            build_objective(config, EncoderInfo(geometry, half, half, "x"), num_classes=10)
    return True


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_traceback_no_hang_no_nonsense(tmp_path, count):
    chance, mark, path = random.Random(count), tmp_path / "mark", tmp_path / "fuzzed.yaml"
    refused, said = 0, []
    for number in range(count):
        shipped = chance.choice(SHIPPED)
        schema = FinetuneConfig if shipped.name.startswith("finetune") else PretrainConfig
        text, begun = shipped.read_text(), time.process_time()
        try:
            text = mutate_values(text, chance) if number % 2 else mutate_text(text, chance, mark)
            path.write_text(text, errors="surrogateescape")
            take(path, schema, tmp_path)
        except InputError as error:
            refused += 1
            said += error.lines
        except Exception as error:
            raise AssertionError(f"{shipped.name}, number {number}: {error!r}\n{text}") from error
        assert time.process_time() - begun < SECONDS
        assert not mark.exists()
    assert not [line for line in said if not line.isprintable()]
    assert max(map(len, said)) < 2000, max(said, key=len)
    # Most of what was changed is wrong.
    assert count * 0.4 < refused < count
