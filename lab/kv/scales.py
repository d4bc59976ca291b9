"""The scales of a quantized KV cache: where they come from, and the file that `lab calibrate` writes.

A value is what is stored times a scale. Fixed scales are given for each layer as scales_2K: keys, then values, one for each KV
head; a scale of the whole tensor is the same for all heads. The file holds the largest magnitudes that were seen and not the
scales themselves, so that it serves both dtypes.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from lab.errors import UserError
from lab.settings import CacheSettings

log = logging.getLogger("lab")

FORMAT = "lab.kv_ranges.1"
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True)
class Ranges:
    """The largest magnitudes of keys and values: for each layer one number, or one for each KV head."""

    model: str
    num_tokens: int  # that they were seen on
    keys: list[list[float]]
    values: list[list[float]]

    def write(self, path: Path) -> None:
        """Write the file. Raises UserError when that cannot be done."""
        try:
            path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}.") from None

    @classmethod
    def read(cls, path: Path) -> "Ranges":
        """Raises UserError for a file that is not there or was not written by `write`."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"cache.scales={path}: {error.strerror}.\nAvailable: token_head, checkpoint, one, or a file of `lab calibrate`."
            ) from None
        except ValueError:
            raise UserError(f"cache.scales={path}: not JSON. `lab calibrate` writes such files.") from None
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise UserError(f"cache.scales={path}: not a file of KV ranges. `lab calibrate` writes such files.")
        try:
            ranges = cls(**data)
            halves = [torch.tensor(layer, dtype=torch.float32) for half in (ranges.keys, ranges.values) for layer in half]
        except (TypeError, ValueError):
            raise UserError(f"cache.scales={path}: damaged. Write it again with `lab calibrate`.") from None
        if any(half.dim() != 1 or not (half.isfinite() & (half >= 0)).all() for half in halves):
            raise UserError(f"cache.scales={path}: ranges must be lists of numbers that are finite and not negative.")
        return ranges


def kv_scales(cache: CacheSettings) -> Literal["none", "token_head", "head"]:
    """How a cache of these settings is scaled, in the words of AttentionSpec."""
    if not cache.is_quantized:
        return "none"
    return "token_head" if cache.scales in ("auto", "token_head") else "head"


def largest(dtype: torch.dtype) -> float:
    """The largest magnitude that a quantized dtype is used up to; -128 of int8 is not."""
    return float(torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max)


def ranges_of(cache: CacheSettings) -> Ranges | None:
    """The file that the settings name, if they name one. Raises UserError for a file that is none of ours."""
    if kv_scales(cache) != "head" or cache.scales in ("checkpoint", "one"):
        return None
    return Ranges.read(Path(cache.scales).expanduser())


def fixed_scales(
    cache: CacheSettings,
    ranges: Ranges | None,
    num_kv_heads: Sequence[int],
    of_checkpoint: Sequence[torch.Tensor | None],
    scheme: str = "float",
) -> list[torch.Tensor]:
    """scales_2K of each layer; empty where the cache has none that are fixed.

    Args:
        ranges: those of the settings' file.
        num_kv_heads: of each layer.
        of_checkpoint: the scales_2K that the checkpoint has for each layer.
        scheme: the numbers that the checkpoint's scales were made for, float (fp8) or int.

    Raises:
        UserError: the checkpoint has no scales, or for another dtype; the ranges are of another model.
    """
    has_scales = all(scales is not None for scales in of_checkpoint)
    if kv_scales(cache) != "head":
        if has_scales:
            log.info("the checkpoint's scales of keys and values are not used: cache.dtype=fp8 cache.scales=checkpoint would")
        return []
    if cache.scales == "one":
        log.warning("cache.scales=one: keys and values over %g are clipped, small ones are lost", largest(DTYPES[cache.dtype]))
        return [torch.ones(2, heads) for heads in num_kv_heads]
    if ranges is not None:
        return _scales_of(ranges, cache, num_kv_heads)
    if not has_scales:
        raise UserError(
            "cache.scales=checkpoint: the checkpoint has no scales of keys and values (tensors *.k_scale and *.v_scale) for "
            "every layer.\nAvailable: token_head, one, or a file of `lab calibrate`."
        )
    if (scheme == "int") != (cache.dtype == "int8"):
        right = "int8" if scheme == "int" else "fp8"
        raise UserError(f"cache.scales=checkpoint: the checkpoint's scales are made for {right}. Set cache.dtype={right}.")
    return list(of_checkpoint)


def _scales_of(ranges: Ranges, cache: CacheSettings, num_kv_heads: Sequence[int]) -> list[torch.Tensor]:
    where = f"cache.scales={cache.scales}, of {ranges.model}"
    if not len(ranges.keys) == len(ranges.values) == len(num_kv_heads):
        raise UserError(f"{where}: it has ranges of {len(ranges.keys)} layers, this model has {len(num_kv_heads)}.")
    scales = []
    for layer, heads in enumerate(num_kv_heads):
        both = ranges.keys[layer], ranges.values[layer]
        if wrong := {len(half) for half in both} - {1, heads}:
            raise UserError(f"{where}: layer {layer} has ranges of {wrong.pop()} KV heads, this model has {heads}.")
        limits = torch.stack([torch.tensor(half, dtype=torch.float32).expand(heads) for half in both])
        scales.append((limits / largest(DTYPES[cache.dtype])).clamp(min=torch.finfo(torch.float32).tiny))
    return scales
