"""Rotary frequencies against transformers' own definitions, at the sizes of real models."""

import json

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lab.model.config import read_config
from lab.model.layers.fused import Formulas
from lab.model.layers.rope import Rope, inverse_frequencies

FACTORS = {"short_factor": [1.0 + 0.02 * i for i in range(48)], "long_factor": [1.0 + 1.3 * i for i in range(48)]}
CASES = {
    "linear": ("llama", {"rope_type": "linear", "factor": 2.5}),
    "llama3": ("llama", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    "llama3-original": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": ("qwen2", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "yarn-betas": ("llama", {"type": "yarn", "factor": 16.0, "beta_fast": 64, "beta_slow": 2, "truncate": False}),
    "yarn-mscale": ("llama", {"type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.5}),
    "yarn-given": ("llama", {"type": "yarn", "factor": 40.0, "attention_factor": 1.5}),
    "su": ("phi3", {"type": "su", "original_max_position_embeddings": 4096, **FACTORS}),
    "longrope": ("phi3", {"type": "longrope", **FACTORS}),
}


def write(folder, architecture, scaling):
    config = {
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "phi3": "Phi3"}[architecture] + "ForCausalLM"],
        "model_type": architecture,
        "vocab_size": 100,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": scaling,
        "max_position_embeddings": 131072,
    }
    if architecture == "phi3":
        config["original_max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("served", [4096, 131072])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_equal_transformers(case, served, tmp_path):
    architecture, scaling = CASES[case]
    write(tmp_path, architecture, scaling)
    theirs = AutoConfig.from_pretrained(tmp_path)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, seq_len=served)
    rope = read_config(tmp_path).rope
    torch.testing.assert_close(inverse_frequencies(rope, served), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 96, 2).float() / 96)
    assert not torch.allclose(expected, plain), "the case scales nothing"


def test_dynamic_is_plain_within_the_positions_of_the_config(tmp_path):
    write(tmp_path, "llama", {"type": "dynamic", "factor": 8.0})
    theirs = AutoConfig.from_pretrained(tmp_path)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, seq_len=131072)
    torch.testing.assert_close(inverse_frequencies(read_config(tmp_path).rope, 131072), expected, rtol=1e-6, atol=0)


def test_table_is_float32_and_as_long_as_served(tmp_path):
    write(tmp_path, "phi3", CASES["longrope"][1])
    rope = Rope(read_config(tmp_path).rope, 300, torch.device("cpu"), Formulas())
    assert rope.cos.shape == (300, 48) and rope.cos.dtype == torch.float32
    cos, sin = rope(torch.tensor([0, 299]))
    torch.testing.assert_close((cos**2 + sin**2)[:, 0], torch.full((2, 48), rope.cos[0, 0].item() ** 2))


def test_rotation_by_hand():
    """A pair is half a head apart; entries beyond the rotated ones stay."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 9.0]]])
    cos, sin = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    assert Formulas().rotate(x, cos, sin).tolist() == [[[-3.0, 2.0, 1.0, 4.0, 9.0]]]
