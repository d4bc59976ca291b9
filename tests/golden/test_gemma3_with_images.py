"""The text part of Gemma-3 as it is published with images: greedy outputs are transformers' own, token for token."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from lab import LLM, SamplingParams
from lab.errors import UserError
from lab.model.config import read_config
from lab.model.safetensors_checkpoint import text_name
from tests.golden.oracle import greedy
from tests.golden.prompts import token_prompts

NUM_TOKENS = 24
PROMPTS = token_prompts()[::4]
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 12,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "sliding")],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, right outputs): what transformers itself saves."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    vision = VISION | {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=TEXT,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=255,
        eoi_token_index=254,
        boi_token_index=253,
    )
    net = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in net.model.language_model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.dim() == 1 else 1.5 / parameter.shape[1] ** 0.5))
        net.model.language_model.embed_tokens.weight.normal_()
    folder = tmp_path_factory.mktemp("gemma3")
    net.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    return folder, [greedy(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]


def generate(folder):
    base = ["compile.mode=none", "model.dtype=float32", "model.max_model_len=256", "cache.num_blocks=400", "num_threads=1"]
    with LLM(str(folder), attention="flash", overrides=base) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        outs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
        return [out.outputs[0].token_ids for out in outs]


def test_as_transformers_saves_it(model, caplog):
    folder, right = model
    config = read_config(folder)
    assert (config.architecture, config.hidden_size, config.sliding_window, config.qk_norm) == ("gemma3", 64, 12, True)
    with caplog.at_level(logging.INFO, "lab"):
        assert generate(folder) == right
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    names = load_file(folder / "model.safetensors")
    num = sum("vision_tower" in name or "multi_modal_projector" in name for name in names)
    assert num > 5
    assert told == [f"{num} tensors for images (vision_tower, multi_modal_projector) are left out: only the text part runs"]


@pytest.mark.parametrize(
    ("body", "head"), [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "")]
)
def test_both_spellings_of_the_names(model, body, head, tmp_path):
    folder, right = model
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        plain = text_name(name, ("vision_tower", "multi_modal_projector"))
        if plain is None:
            weights[f"model.{name}" if not head else name.removeprefix("model.")] = weight
        elif plain != "lm_head.weight":
            weights[plain.replace("model.", body, 1)] = weight
    if head:
        weights[f"{head}weight"] = weights[f"{body}embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert generate(tmp_path) == right


def test_a_tensor_of_neither_part_is_refused(model, tmp_path):
    folder, _ = model
    weights = load_file(folder / "model.safetensors") | {"audio_tower.weight": torch.ones(2)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(UserError, match="'audio_tower.weight' belongs to no part of a gemma3 model"):
        generate(tmp_path)


def test_without_a_text_part_it_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma3ForConditionalGeneration"]}))
    with pytest.raises(UserError, match="'text_config' must be an object"):
        read_config(tmp_path)
