"""The average of the weights in whole runs."""

import torch
from helpers.commands import summary_of
from helpers.finetune import CNN
from safetensors.torch import load_file

from mae_vit.training.checkpoints.checkpoint import list_checkpoints, load_checkpoint


def parameters_at_each_step(folder) -> list[dict[str, torch.Tensor]]:
    return [load_checkpoint(path).state.parameters for path in list_checkpoints(folder / "checkpoints")]


def test_the_average_is_of_all_steps_and_is_what_is_measured(call, tmp_path):
    every = ["checkpoint.every_steps=1", "finetune.holdout=0", "train.steps=5"]
    assert call(*every, name="plain", **CNN) == 0
    assert call(*every, "train.ema_decay=0.3", name="averaged", **CNN) == 0
    # The first are the weights before the first step.
    expected, *steps = parameters_at_each_step(tmp_path / "averaged")
    assert len(steps) == 5
    for update, now in enumerate(steps, start=1):
        decay = min(0.3, (1 + update) / (10 + update))
        expected = {name: decay * expected[name].double() + (1 - decay) * now[name].double() for name in now}
    saved = load_checkpoint(list_checkpoints(tmp_path / "averaged" / "checkpoints")[-1]).state
    model = load_file(tmp_path / "averaged" / "model.safetensors")
    for name, value in expected.items():
        torch.testing.assert_close(saved.average[name].double(), value, atol=1e-6, rtol=1e-5)
        assert torch.equal(model[name.removeprefix("network.")], saved.average[name]), name
    # Training itself does not see it.
    for ours, plain in zip(steps, parameters_at_each_step(tmp_path / "plain")[1:], strict=True):
        assert all(torch.equal(ours[name], plain[name]) for name in plain)
    assert not load_checkpoint(list_checkpoints(tmp_path / "plain" / "checkpoints")[-1]).state.average
    # Statistics of BatchNorm are averaged with the weights; what they count is not.
    mean = "network.1.running_mean"
    assert not torch.equal(saved.average[mean], saved.buffers[mean])
    assert saved.average["network.1.num_batches_tracked"] == 5


def test_the_epoch_is_chosen_among_averages(call, tmp_path):
    assert call("train.ema_decay=0.7", "optim.lr=3e-2") == 0
    best = summary_of(tmp_path / "run")["best_step"]
    saved = load_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{best:08d}").state
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(model["head.weight"], saved.average["head.weight"])
    assert not torch.equal(model["head.weight"], saved.parameters["head.weight"])
