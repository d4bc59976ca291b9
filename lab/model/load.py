"""Build a model and fill it from a checkpoint.

Modules with weights know the checkpoint names of their tensors and read them one after another into place; each linear
layer is repacked as soon as it is read, so that loading never holds more than the weights and one layer.
"""

import logging
import re
import time
from pathlib import Path

import torch
from torch import nn

from lab import registry
from lab.contracts.moe import Moe
from lab.contracts.quant import Quant
from lab.errors import UserError, unknown
from lab.memory import HugePages, give_back
from lab.model.checkpoint import Checkpoint
from lab.model.config import ModelConfig
from lab.model.decoder import Build, Decoder
from lab.model.dummy_checkpoint import DummyCheckpoint
from lab.model.gguf_checkpoint import GgufCheckpoint
from lab.model.layers.fused import fused_for
from lab.model.layers.linear import Linear
from lab.model.mtp_head import is_of_mtp
from lab.model.safetensors_checkpoint import SafetensorsCheckpoint, find_files

log = logging.getLogger("lab")

FORMATS = ("auto", "safetensors", "gguf", "dummy")
# Tensors that old checkpoints carry and no model needs: they follow from the config.
HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")
GIVE_BACK_BYTES = 32 << 20  # of weights between two times that freed memory is handed back


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    quant: Quant,
    moe: Moe,
    max_model_len: int | None = None,
    batch_invariant: bool = False,
) -> Decoder:
    """The model of `folder`, in eval mode and ready to run.

    Args:
        dtype: of activations and unquantized weights.
        load_format: auto | safetensors | gguf | dummy (random weights, for which config.json is enough).
        batch_invariant: whether a token's outputs must not depend on the tokens beside it to the last bit.
        max_model_len: the longest context that will be served; sizes the rotary tables. None: max_position_embeddings.

    Raises:
        UserError: the checkpoint does not fit the config, is damaged, or is in a format that cannot be loaded.
    """
    folder = Path(folder)
    started = time.perf_counter()
    _check_quantization(folder, config, quant)
    checkpoint = open_checkpoint(folder, config, load_format)
    try:
        plain = registry.get("quant", "none")
        build = Build(
            config,
            dtype,
            device,
            quant,
            plain.load()(plain.make_options({})),
            fused_for(device, dtype, batch_invariant),
            max_model_len or config.max_position_embeddings,
            batch_invariant,
        )
        if batch_invariant and not build.fused.is_invariant:
            raise UserError(
                "debug.batch_invariant: norms are summed in one order only by lab's own kernels, which take float32 and "
                "bfloat16 on the CPU and need a C++ compiler there, on CUDA the package 'triton'; "
                f"this is {dtype} on {device.type}."
            )
        with torch.inference_mode():
            model = Decoder(build)
            fill(model, checkpoint)
        _check_extra(checkpoint, config)
    finally:
        checkpoint.close()
    seconds, size = time.perf_counter() - started, weights_bytes(model) / 2**20
    what = "random weights (model.load_format=dummy)" if load_format == "dummy" else "weights"
    log.info("loaded %s in %.1f s: %.0f MiB of %s, as stored for computing", folder, seconds, size, what)
    return model.eval()


def fill(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Read every tensor of the model, the largest layers first: while one is repacked it is there twice."""
    modules = [module for module in model.modules() if hasattr(module, "load")]
    pages = HugePages()
    freed = 0
    for module in sorted(modules, key=_repacked_elements, reverse=True):
        module.load(checkpoint)
        if isinstance(module, Linear):
            module.keep({name: pages.hold(tensor) for name, tensor in module.weights.items()})
            freed += module.num_bytes
            if freed > GIVE_BACK_BYTES:  # the tensors as they were read and repacked would pile up beside the weights
                give_back()
                freed = 0
    give_back()


def _repacked_elements(module: nn.Module) -> int:
    return module.spec.in_features * module.spec.out_features if isinstance(module, Linear) else 0


def weights_bytes(model: nn.Module) -> int:
    """The memory that the model's weights take, as they are stored now."""
    return sum(module.num_bytes for module in model.modules() if hasattr(module, "num_bytes"))


def open_checkpoint(folder: Path, config: ModelConfig, load_format: str) -> Checkpoint:
    """The folder's weights. `auto` takes safetensors if there are any, else a GGUF file.

    Raises:
        UserError: the folder has no weights of that format, or only pickled ones.
    """
    if load_format not in FORMATS:
        raise unknown("load format", load_format, FORMATS)
    if load_format == "dummy":
        return DummyCheckpoint()
    gguf_files = sorted(folder.glob("*.gguf"))
    if load_format in ("auto", "safetensors") and find_files(folder):
        return SafetensorsCheckpoint(folder, config.image_parts)
    if load_format in ("auto", "gguf") and gguf_files:
        if len(gguf_files) > 1:
            names = ", ".join(path.name for path in gguf_files)
            raise UserError(f"{folder} has {len(gguf_files)} GGUF files ({names}): give the path of one of them.")
        return GgufCheckpoint(gguf_files[0], config)
    raise _no_weights(folder, load_format)


def _no_weights(folder: Path, load_format: str) -> UserError:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        return UserError(
            f"{folder} has only pickled weights ({pickled[0]}), which can run code when they are read. Convert them to "
            "safetensors: load them with transformers from a source you trust, and use save_pretrained."
        )
    kind = "safetensors or GGUF" if load_format == "auto" else load_format
    return UserError(f"{folder} has no {kind} weights. For random weights set model.load_format=dummy.")


def _check_quantization(folder: Path, config: ModelConfig, quant: Quant) -> None:
    quantization = config.raw.get("quantization_config")
    if quantization and not quant.detect(config.raw):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise UserError(
            f"{folder / 'config.json'}: the checkpoint is quantized ('{method}'), and quant plugin "
            f"'{type(quant).name}' does not read that format."
        )


def _check_extra(checkpoint: Checkpoint, config: ModelConfig) -> None:
    for name in sorted(set(checkpoint.names()) - checkpoint.used):
        if HARMLESS.search(name) or (config.tie_word_embeddings and name == "lm_head.weight"):
            continue
        if is_of_mtp(name, config):  # read where drafts are made by it
            continue
        raise UserError(
            f"{checkpoint.file_of(name)}: tensor '{name}' belongs to no part of a {config.architecture} model with "
            f"{config.num_layers} layers. Is config.json the one of these weights?"
        )
