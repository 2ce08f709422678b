"""Encoders of the Hub: the same bits as the file's, of a commit that is named; one line for what goes wrong."""

from pathlib import Path

import pytest
import torch
from helpers.commands import one_line
from helpers.encoders import encoder_file
from safetensors.torch import save
from transformers import ViTConfig, ViTModel

import mae_vit
from mae_vit.cli.main import main
from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.finetuning.config.pretrained import WeightsOverrides, run_name


@pytest.fixture
def file(tmp_path):
    return encoder_file(tmp_path / "encoder.safetensors", images_seen=700)


def test_a_repository_of_transformers_is_loaded_with_its_configs(hub, tmp_path):
    """Its heads and its normalization are of the files beside the weights."""
    config = ViTConfig(
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
    )
    model = ViTModel(config).eval()
    model.save_pretrained(tmp_path / "theirs")
    files = {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    files["preprocessor_config.json"] = b'{"image_mean": [0.5, 0.5, 0.4], "image_std": [0.2, 0.3, 0.4]}'
    hub.add("anna/vit", files)
    loaded = mae_vit.load_encoder("hf:anna/vit")
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        # Random tokens vary little, where transformers' eps of 1e-12 and ours differ.
        torch.testing.assert_close(loaded(images), model(images).last_hidden_state[:, 0], atol=1e-2, rtol=0)
    assert (loaded.info.vit.num_heads, loaded.info.mean) == (3, (0.5, 0.5, 0.4))


def test_a_repository_without_a_known_network_says_what_it_has(hub):
    theirs = save({"text.embeddings.weight": torch.zeros(4, 4)}, {"format": "pt"})
    hub.add("anna/text", {"model.safetensors": theirs})
    with pytest.raises(InputError, match=r"^hf:anna/text: .*text\.embeddings"):
        mae_vit.load_encoder("hf:anna/text")


def test_offline_the_cache_serves_and_nothing_else(hub, file, monkeypatch):
    from huggingface_hub import constants

    repo = hub.add("anna/mae", {"encoder.safetensors": file.read_bytes()})
    mae_vit.load_encoder("hf:anna/mae")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert mae_vit.load_encoder("hf:anna/mae").weights.source.endswith(repo.refs["main"])
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        mae_vit.load_encoder("hf:anna/other")
    assert not hub.requests


def test_a_pickle_is_not_even_fetched(hub):
    hub.add("anna/mae", {"pytorch_model.bin": b"pickled", "model.pth": b"pickled"})
    with pytest.raises(InputError, match=r"encoder\.safetensors or model\.safetensors"):
        mae_vit.load_encoder("hf:anna/mae")
    assert not [path for method, path in hub.requests if method == "GET" and "/resolve/" in path]


def test_an_encoder_that_does_not_come_is_not_replaced_by_another_file(hub, file):
    """`model.safetensors` may be of another library."""
    hub.add("anna/mae", {"encoder.safetensors": file.read_bytes(), "model.safetensors": file.read_bytes()})
    hub.faults["/encoder.safetensors"] = ["always 500"]
    with pytest.raises(FetchUnavailable, match="status 500"):
        mae_vit.load_encoder("hf:anna/mae")


@pytest.mark.parametrize(
    "name",
    [
        *("hf:", "hf:anna/mae@", "hf:anna/..", "hf://anna/mae", "hf:anna/maee", "hf:anna/mae@mian"),
        *("hf:anna/gated", "hf:anna/private", "hf:anna/broken"),
    ],
)
def test_what_goes_wrong_is_one_line(hub, file, tmp_path, capfd, name, said):
    content = {"encoder.safetensors": file.read_bytes()}
    hub.add("anna/mae", content)
    hub.add("anna/gated", content, gated=True)
    hub.add("anna/private", content, private=True)
    hub.add("anna/broken", content)
    hub.faults["/anna/broken/"] = ["always 500"]
    code = main(["export", name, "--to", "timm", "--out", str(tmp_path / "out")])
    assert code == (75 if name == "hf:anna/broken" else 2)
    said(one_line(capfd))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("token", ["hf_aWrongToken", "hf_wröng"])
def test_a_wrong_token_is_one_line_without_the_token(hub, file, monkeypatch, tmp_path, capfd, token):
    hub.add("anna/mae", {"encoder.safetensors": file.read_bytes()})
    monkeypatch.setenv("HF_TOKEN", token)
    assert main(["export", "hf:anna/mae", "--to", "timm", "--out", str(tmp_path / "out")]) == 2
    error = capfd.readouterr().err
    assert "token" in error
    assert "hf auth login" in error
    assert token not in error
    assert len(error.splitlines()) == 1


def test_fine_tuning_pins_the_commit(hub, file):
    repo = hub.add("anna/mae", {"encoder.safetensors": file.read_bytes()})
    raw = {"model": {}, "finetune": {}}
    WeightsOverrides("hf:anna/mae@main", Path("recipe.yaml"))(raw)
    assert raw["finetune"]["start"] == f"hf:anna/mae@{repo.refs['main']}"
    assert raw["run"]["name"] == "recipe-mae"
    assert run_name("hf:anna/mae@v1.0") == "mae"


@pytest.mark.parametrize("weights", ["hf:anna/mae", "timm:vit_tiny_patch16_224"])
def test_where_no_connection_can_be_made_nothing_waits(hub, monkeypatch, weights):
    """huggingface_hub would try again for 23 s for each file."""
    hub.stop()

    def sleep(seconds):
        raise AssertionError(f"waits for {seconds} s")

    monkeypatch.setattr("time.sleep", sleep)
    with pytest.raises((FetchUnavailable, InputError), match="cannot be reached") as caught:
        mae_vit.load_encoder(weights)
    assert ("hf download timm/vit_tiny" in str(caught.value)) == weights.startswith("timm")
