"""GGUF files written from the rigs, with the gguf package's own writer."""

import json

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType, quantize
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
_WITH_OUTPUT_NORMS = _PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GLOBALS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

_LETTERS = [chr(ord("a") + i) for i in range(26)]
GEMMA_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "\u2581", *_LETTERS, "th", "he"]
GEMMA_TOKENS += [chr(0x100 + i) for i in range(256 - len(GEMMA_TOKENS))]


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes with, in the order of GPT-2's vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def gguf_name(name: str, parts: dict[str, str] = _PARTS) -> str:
    base, _, suffix = name.rpartition(".")
    if base in _GLOBALS:
        return f"{_GLOBALS[base]}.{suffix}"
    _, _, layer, part = base.split(".", 3)
    return f"blk.{layer}.{parts[part]}.{suffix}"


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows as llama.cpp's converter stores them: the halves of a head interleaved."""
    return weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(folder, path, *, kind="F32", tokenizer=True, extra=None, change=None):
    """The model of a rig's folder as a GGUF file whose matrices are of type `kind`.

    Args:
        extra: metadata to add. change: edits the dict of tensors, by GGUF name, before they are written.
    """
    config = json.loads((folder / "config.json").read_text())
    name = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    is_gemma = name.startswith("gemma")
    writer = GGUFWriter(path, name)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if is_gemma:
        writer.add_sliding_window(config["sliding_window"])
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if name == "gemma3":
        rope = config["rope_parameters"]["full_attention"]
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    else:
        writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    if tokenizer and is_gemma:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(GEMMA_TOKENS)
        writer.add_token_scores([float(-i) for i in range(256)])
        writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.UNKNOWN] + [TokenType.NORMAL] * 252)
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(3)
        writer.add_pad_token_id(0)
    elif tokenizer:
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
        if is_gemma and hf_name.endswith("norm.weight"):
            weight = weight + 1  # what the norm multiplies by
        tensors[gguf_name(hf_name, _WITH_OUTPUT_NORMS if is_gemma else _PARTS)] = weight.numpy()
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
