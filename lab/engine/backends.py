"""The attention backends of a run: one for every shape of layer, the model's and those of a proposer's own."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from lab.capabilities import Needs
from lab.contracts.attention import Attention, AttentionSpec
from lab.contracts.spec import Proposer
from lab.engine.resolution import Resolved, resolve
from lab.kv.scales import DTYPES, kv_scales
from lab.model.layers.attention import AttentionLayer
from lab.settings import Settings


def asked_by_drafts(proposer: Proposer, *, is_bound: bool) -> set[str]:
    """The features that verifying its drafts asks of the model's attention; before it is bound, those it cannot do without."""
    if not proposer.num_drafts:
        return set()
    has_trees = proposer.tree_depth and (is_bound or not proposer.tree_optional)
    return {"spec_verify", "tree_verify"} if has_trees else {"spec_verify"}


def backends_of(
    settings: Settings,
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    device: torch.device,
    chosen: dict[str, Resolved],
    drafts: set[str],
) -> list[Attention]:
    """The attention backend of each layer; layers of one shape share one. Records the choice in `chosen` under `attention`.

    `drafts`: the features that drafts ask for.
    """
    of_spec: dict[AttentionSpec, Attention] = {}
    backends = []
    for layer in layers:
        spec = _spec_of(settings, layer, dtype, device)
        if spec not in of_spec:
            resolved = resolve("attention", settings.attention, _attention_needs(spec, drafts))
            key = "attention" if "attention" not in chosen else f"attention.{len(of_spec)}"
            chosen[key] = resolved
            of_spec[spec] = resolved.make(spec)
        backends.append(of_spec[spec])
    return backends


def resolve_for_shapes(
    settings: Settings, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device, drafts: set[str]
) -> Resolved:
    """The plugin of the first layer, once it is known that there is one for every shape of layer: before any weight is read.

    Raises:
        UserError: as `backends_of`.
    """
    specs = dict.fromkeys(_spec_of(settings, layer, dtype, device) for layer in layers)
    found = [resolve("attention", settings.attention, _attention_needs(spec, drafts)) for spec in specs]
    for resolved, spec in zip(found, specs, strict=True):
        resolved.make(spec)  # which refuses options that are wrong together, or for this shape
    return found[0]


def _spec_of(settings: Settings, layer: AttentionLayer, dtype: torch.dtype, device: torch.device) -> AttentionSpec:
    name = settings.cache.dtype
    return AttentionSpec(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        scale=layer.scale,
        block_size=settings.cache.block_size,
        dtype=dtype,
        kv_dtype=dtype if name == "auto" else DTYPES[name] if name in DTYPES else getattr(torch, name),
        device=device,
        sliding_window=layer.sliding_window,
        softcap=layer.softcap,
        kv_scales=kv_scales(settings.cache),
        batch_invariant=settings.debug.batch_invariant,
        has_sinks=layer.sinks_N is not None,
    )


def draft_backends_of(
    settings: Settings, proposer: Proposer, dtype: torch.dtype, device: torch.device, chosen: dict[str, Resolved]
) -> list[Attention]:
    """The attention backend of each layer of the proposer's own, recorded under `spec.attention`. They keep keys and values
    in the model's dtype: there are few of them, and nobody has calibrated scales for them.
    """
    plain = replace(settings, cache=replace(settings.cache, dtype="auto", scales="auto"))
    own: dict[str, Resolved] = {}
    trees = {"tree_verify"} if proposer.tree_depth else set()  # drafted level by level
    backends = backends_of(plain, proposer.attention_layers, dtype, device, own, trees)
    chosen.update({f"spec.{key}": resolved for key, resolved in own.items()})
    return backends


def _attention_needs(spec: AttentionSpec, drafts: set[str]) -> Needs:
    features = set(drafts)
    if spec.num_heads != spec.num_kv_heads:
        features.add("gqa")
    if spec.sliding_window is not None:
        features.add("sliding_window")
    if spec.softcap is not None:
        features.add("softcap")
    if spec.kv_scales == "token_head":
        features.add("token_head_scales")
    if spec.batch_invariant:
        features.add("batch_invariant")
    if spec.has_sinks:
        features.add("sinks")
    return Needs(
        device=spec.device.type,
        dtype=dtype_name(spec.dtype),
        kv_dtype=dtype_name(spec.kv_dtype),
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        features=frozenset(features),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as settings and capabilities name it."""
    for name, quantized in DTYPES.items():
        if dtype == quantized:
            return name
    return str(dtype).removeprefix("torch.")
