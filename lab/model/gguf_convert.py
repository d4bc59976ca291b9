"""GGUF to transformers' format: config.json and tokenizer from the metadata, and the weights as safetensors.

`describe` writes everything but the weights; `convert` writes the weights too, in bfloat16.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lab.errors import UserError, unknown
from lab.model.architectures import OF_MODEL_TYPE
from lab.model.config import read_config
from lab.model.gguf_file import FLOAT_TYPES, GgufFile

ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")  # Mistral is converted to GGUF as llama
MODEL_TYPES = {"gemma3": "gemma3_text"}  # where transformers has another name: the file is the text part alone
GEMMA_BLOCKS_OF_27B = {"gemma2": 46, "gemma3": 62}
_DTYPE_OF = {"F32": "float32", "F16": "float16"}
# The vocabulary was made with every digit on its own; without that, runs of spaces before a digit split otherwise.
_DIGITS_APART = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def convert(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file into `folder`, the weights dequantized to bfloat16.

    Raises:
        UserError: the file is damaged, or of an architecture or tokenizer that lab does not know.
    """
    import torch
    from safetensors.torch import save_file

    from lab.model.gguf_checkpoint import GgufCheckpoint

    describe(path, folder, dtype="bfloat16")
    config = read_config(folder)
    checkpoint = GgufCheckpoint(path, config)
    weights = {}
    for name, shape in checkpoint.shapes():
        weights[name] = torch.empty(shape, dtype=torch.bfloat16)
        checkpoint.read(name, weights[name])
    checkpoint.close()
    target = folder / "model.safetensors"
    save_file(weights, str(target), metadata={"format": "pt"})
    target.chmod((folder / "config.json").stat().st_mode)  # safetensors makes it readable for its owner alone


def describe(path: Path, folder: Path, dtype: str | None = None) -> None:
    """Write config.json, generation_config.json and the tokenizer of a GGUF file into `folder`.

    Args:
        dtype: the torch_dtype to declare; None: that of the matrices in the file, bfloat16 for quantized ones.
    """
    file = GgufFile(path)
    try:
        config = _config(file, dtype)
        generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", generation | {"eos_token_id": _end_ids(file)})
        _write_tokenizer(file, folder)
    finally:
        file.close()


def _config(file: GgufFile, dtype: str | None) -> dict[str, Any]:
    values = file.metadata
    name = values.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(f"{file.path}: {unknown('GGUF architecture', str(name), ARCHITECTURES)}")

    def value(key: str, default: Any = None) -> Any:
        found = values.get(f"{name}.{key}", default)
        if found is None:
            raise UserError(f"{file.path}: its metadata lacks '{name}.{key}'.")
        return found

    if value("expert_count", 0):
        raise UserError(f"{file.path}: mixture-of-experts models are not supported.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{file.path}: tensor 'token_embd.weight' is missing.")
    heads = value("attention.head_count")
    head_dim = value("attention.key_length", value("embedding_length") // heads)
    config = {
        "architectures": [OF_MODEL_TYPE[MODEL_TYPES.get(name, name)]],
        "model_type": MODEL_TYPES.get(name, name),
        "vocab_size": embedding.shape[0],
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": _shortest(value("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(value("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, name),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": name != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "sliding_window": value("attention.sliding_window", 0) or None,
        "torch_dtype": dtype or _dtype(file),
    }
    if name == "phi3":
        config["partial_rotary_factor"] = value("rope.dimension_count", head_dim) / head_dim
        config["original_max_position_embeddings"] = value("rope.scaling.original_context_length", value("context_length"))
    if name in GEMMA_BLOCKS_OF_27B:
        config |= _gemmas(values, name, config)
    for key, source in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        config[key] = values.get(f"tokenizer.ggml.{source}_token_id")
    return config


def _gemmas(values: dict[str, Any], name: str, config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma's config.json has besides. Which layers have the window, and their rope, no file says: it is as published.

    The scale of the scores is not in the file either: llama.cpp, too, tells the 27B models by their blocks.
    """
    del config["hidden_act"]
    is_27b = config["num_hidden_layers"] == GEMMA_BLOCKS_OF_27B[name]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    own = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
        "attn_logit_softcapping": values.get(f"{name}.attn_logit_softcapping"),
        "final_logit_softcapping": values.get(f"{name}.final_logit_softcapping"),
    }
    if name == "gemma3":
        own["rope_theta"] = _shortest(values.get("gemma3.rope.freq_base", 1e6))
    return own


def _rope_scaling(file: GgufFile, name: str) -> dict[str, Any] | None:
    """The rotary scaling: named in the metadata, or given as tensors of factors, which longrope can express."""
    values = file.metadata
    limit = values[f"{name}.context_length"]
    original = values.get(f"{name}.rope.scaling.original_context_length", limit)
    if "rope_freqs.weight" in file.tensors:  # Llama 3.1 and later
        factors = _factors(file, "rope_freqs.weight")
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": original,
        }
    if "rope_factors_long.weight" in file.tensors:
        return {
            "rope_type": "longrope",
            "short_factor": _factors(file, "rope_factors_short.weight"),
            "long_factor": _factors(file, "rope_factors_long.weight"),
            "attention_factor": values.get(f"{name}.rope.scaling.attn_factor"),
            "original_max_position_embeddings": original,
        }
    kind = values.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UserError(f"{file.path}: {unknown('rope scaling', str(kind), ('none', 'linear', 'yarn'))}")
    factor = values.get(f"{name}.rope.scaling.factor", 1.0)
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}


def _factors(file: GgufFile, name: str) -> list[float]:
    if name not in file.tensors:
        raise UserError(f"{file.path}: tensor '{name}' is missing.")
    return np.concatenate([chunk.reshape(-1) for _, chunk in file.dequantized(name)]).tolist()


def _dtype(file: GgufFile) -> str:
    """The dtype of the matrices, when all have the same float type."""
    kinds = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return _DTYPE_OF.get(kinds.pop(), "bfloat16") if len(kinds) == 1 and kinds <= FLOAT_TYPES else "bfloat16"


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _end_ids(file: GgufFile) -> list[int]:
    """Every token that ends an answer: of the text, and of a turn where the file names one of its own."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (file.metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return sorted({i for i in found if i is not None})


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    """The tokenizer that transformers builds from the metadata, checked against the file's vocabulary, id by id."""
    from transformers import AutoTokenizer

    values = file.metadata
    tokens = values.get("tokenizer.ggml.tokens")
    if not tokens:
        raise UserError(f"{file.path}: its metadata has no tokenizer.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    except (ValueError, KeyError) as error:
        raise UserError(f"{file.path}: transformers cannot build its tokenizer: {error}") from error
    tokenizer.save_pretrained(folder)

    settings_path = folder / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only", "backend"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["clean_up_tokenization_spaces"] = False
    settings["model_max_length"] = values[f"{values['general.architecture']}.context_length"]
    _write_json(settings_path, settings)
    if values.get("tokenizer.ggml.pre") == "smollm":
        model_path = folder / "tokenizer.json"
        model = json.loads(model_path.read_text(encoding="utf-8"))
        model["pre_tokenizer"] = _DIGITS_APART
        model_path.write_text(json.dumps(model, ensure_ascii=False), encoding="utf-8")
    _check_tokenizer(file, folder, tokens)


def _check_tokenizer(file: GgufFile, folder: Path, tokens: list[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = tokenizer.convert_ids_to_tokens(list(range(len(tokens))))
    if file.metadata["general.architecture"] in GEMMA_BLOCKS_OF_27B:  # stores runs of spaces as such
        tokens = ["\u2581" * len(token) if token and not token.strip(" ") else token for token in tokens]
    different = [i for i, (ours, theirs) in enumerate(zip(found, tokens, strict=True)) if ours != theirs]
    if different:
        i = different[0]
        raise UserError(
            f"{file.path}: the tokenizer built from its metadata differs from its vocabulary in {len(different)} tokens; "
            f"token {i} is {found[i]!r} and should be {tokens[i]!r}."
        )
    for name, key in (("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")):
        wanted = file.metadata.get(f"tokenizer.ggml.{key}")
        if wanted is not None and getattr(tokenizer, name) != wanted:
            raise UserError(f"{file.path}: the tokenizer's {name} is {getattr(tokenizer, name)}, not {wanted} as in the file.")
    if tokenizer.chat_template != file.metadata.get("tokenizer.chat_template"):
        raise UserError(f"{file.path}: the tokenizer's chat template is not the one in the file.")


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
