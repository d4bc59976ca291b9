"""GGUF files written from the rigs, with the gguf package's own writer."""

import json

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from safetensors.torch import load_file

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GLOBALS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes with, in the order of GPT-2's vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def gguf_name(name: str) -> str:
    base, _, suffix = name.rpartition(".")
    if base in _GLOBALS:
        return f"{_GLOBALS[base]}.{suffix}"
    _, _, layer, part = base.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{suffix}"


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows as llama.cpp's converter stores them: the halves of a head interleaved."""
    return weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(folder, path, *, kind="F32", tokenizer=True, extra=None, change=None):
    """The model of a rig's folder as a GGUF file whose matrices are of type `kind`.

    Args:
        extra: metadata to add. change: edits the dict of tensors, by GGUF name, before they are written.
    """
    config = json.loads((folder / "config.json").read_text())
    name = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(path, name)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([*byte_alphabet()[:-1], "th"])
        writer.add_token_types([TokenType.NORMAL] * 256)
        writer.add_token_merges(["t h"])
        writer.add_eos_token_id(7)
    for key, value in (extra or {}).items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(key, value)

    tensors = {}
    for hf_name, weight in load_file(folder / "model.safetensors").items():
        if name == "llama" and "q_proj" in hf_name:
            weight = permuted(weight, heads)
        if name == "llama" and "k_proj" in hf_name:
            weight = permuted(weight, kv_heads)
        tensors[gguf_name(hf_name)] = weight.numpy()
    if change is not None:
        change(tensors)
    for tensor_name, array in tensors.items():
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(tensor_name, array.astype(np.float32))
        elif kind == "F16":
            writer.add_tensor(tensor_name, array.astype(np.float16))
        else:
            quant = GGMLQuantizationType[kind]
            writer.add_tensor(tensor_name, quantize(array, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
