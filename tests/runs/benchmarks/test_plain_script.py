"""The independent script of few labels reads the shards by itself, and takes the same images as a run."""

import torch
from helpers.commands import ROOT

from benchmarks import plain_small_data
from mae_vit.config.load import load_config
from mae_vit.data.index import open_index
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import open_data
from mae_vit.runtime.ranks import Ranks


def test_it_trains_on_the_images_of_a_run_and_holds_out_the_same(digits):
    images, labels, keys = plain_small_data.read(digits, "train")
    assert len(images) == len(labels) == len(keys) == 1497
    trained, held_out = plain_small_data.subset(labels, keys, per_class=40, held_out=4)
    options = [f"data.path={digits}", "data.labels_per_class=40", "model.in_chans=1", "model.img_size=8"]
    words = [*options, "data.augment={crop: none}"]
    config = load_config(FinetuneConfig, ROOT / "configs/finetune/simple_cnn_cifar.yaml", words)
    data = open_data(config, Ranks(0, 1, 0, 1), torch.device("cpu"))
    run_keys = open_index(digits, "train").keys()
    assert {keys[place] for place in trained} == {run_keys[place] for place in data.train}
    assert {keys[place] for place in held_out} == {run_keys[place] for place in data.held_out}
