"""What a plugin can do, what a run needs, and the one function that compares them. Torch-free.

Every kind of plugin declares one `Capabilities`. An empty set or a None there means "no limit". `choose` picks the plugin
for a run: a name given by the user is used or refused with the reasons, never replaced; only `auto` chooses by itself.
"""

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from lab import native
from lab.errors import UserError, unknown

API_VERSION = 1
GRAPH_SUPPORT = ("never", "decode", "uniform", "any")  # each includes those before it
FEATURES = (  # what runs may ask of a plugin
    *("gqa", "sliding_window", "softcap", "sinks", "spec_verify", "tree_verify", "mla", "lse", "cascade"),
    "token_head_scales",
    *("batch_invariant", "moe", "tensor_parallel", "expert_parallel"),
)
TOOLS = {"cxx": native.available}  # each says why it is lacking, or None


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a plugin can serve. Sets left empty and numbers left None put no limit."""

    api_version: int = API_VERSION
    devices: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()  # of activations: float32, bfloat16, float16
    kv_dtypes: frozenset[str] = frozenset()  # of the cache: those above, fp8 (e4m3), int8
    head_dims: frozenset[int] = frozenset()
    block_multiple: int = 1  # block sizes must be a multiple of it
    features: frozenset[str] = frozenset()  # of FEATURES
    lacks: tuple[tuple[str, str], ...] = ()  # (feature, what would have to be otherwise), where that is not the plugin itself
    graph: Literal["never", "decode", "uniform", "any"] = "never"  # which batches can be captured
    packages: tuple[str, ...] = ()  # importable names that must be installed; "cuda:triton" on that device alone
    kv_layout: str = ""  # attention: plugins that name one layout can share a cache; empty: it is this one's own
    requires: frozenset[str] = frozenset()  # tools of the machine: cxx, a C++ compiler
    priority: int = 0  # among usable plugins `auto` takes the highest

    def __post_init__(self) -> None:
        for name in ("devices", "dtypes", "kv_dtypes", "head_dims", "features", "packages", "requires"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"capabilities: {name} takes a set of names, not the one text {getattr(self, name)!r}")
        for name in ("devices", "dtypes", "kv_dtypes", "head_dims", "features", "requires"):
            object.__setattr__(self, name, frozenset(getattr(self, name)))
        if strange := sorted(self.requires - TOOLS.keys()):
            raise ValueError(f"capabilities: requires takes {', '.join(TOOLS)}; got {', '.join(strange)}")
        if strange := sorted(self.features - set(FEATURES)):
            raise ValueError(f"capabilities: {unknown('feature', strange[0], FEATURES)}")
        if self.graph not in GRAPH_SUPPORT:
            raise ValueError(f"capabilities: graph must be one of {', '.join(GRAPH_SUPPORT)}; got {self.graph!r}")


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run asks of a plugin. A None asks nothing."""

    device: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    head_dim: int | None = None
    block_size: int | None = None
    features: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Verdict:
    """Whether one plugin can serve a run: `reasons` is empty when it can."""

    name: str
    reasons: tuple[str, ...]
    priority: int = 0


def unmet(capabilities: Capabilities, needs: Needs) -> list[str]:
    """The reasons why these capabilities do not meet the needs; an empty list means that they do."""
    reasons = []
    if capabilities.api_version != API_VERSION:
        reasons.append(f"written for plugin API version {capabilities.api_version}, this is version {API_VERSION}")
    for entry in capabilities.packages:
        device, _, package = entry.rpartition(":")
        if device in ("", needs.device) and not _is_installed(package):
            reasons.append(f"package '{package}' is not installed")
    reasons += [lack for tool in sorted(capabilities.requires) if (lack := TOOLS[tool]())]
    one_of = (
        ("device", needs.device, capabilities.devices, "runs on"),
        ("dtype", needs.dtype, capabilities.dtypes, "takes"),
        ("KV dtype", needs.kv_dtype, capabilities.kv_dtypes, "takes"),
        ("head dim", needs.head_dim, capabilities.head_dims, "takes"),
    )
    for what, asked, offered, verb in one_of:
        if asked is not None and offered and asked not in offered:
            reasons.append(f"{what} {asked} (it {verb} {', '.join(str(x) for x in sorted(offered))})")
    if needs.block_size is not None and needs.block_size % capabilities.block_multiple:
        reasons.append(f"block size {needs.block_size} (it takes multiples of {capabilities.block_multiple})")
    for feature in sorted(needs.features - capabilities.features):
        why = dict(capabilities.lacks).get(feature)
        reasons.append(f"it has no {feature}" + (f" ({why})" if why else ""))
    return reasons


def common(first: Capabilities, second: Capabilities, who: str) -> Capabilities:
    """What two plugins can serve that share the work of one, named `who` in the message; `priority` is the lower one.

    Raises UserError when they have no device, dtype or head dim in common.
    """
    shared = {}
    for name in ("devices", "dtypes", "kv_dtypes", "head_dims"):
        its, others = getattr(first, name), getattr(second, name)
        shared[name] = its & others if its and others else its | others
        if its and others and not shared[name]:
            sets = [", ".join(str(x) for x in sorted(s)) for s in (its, others)]
            raise UserError(f"{who} have no {name.replace('_', ' ')} in common: {sets[0]}; {sets[1]}.")
    return Capabilities(
        **shared,
        api_version=first.api_version,
        block_multiple=math.lcm(first.block_multiple, second.block_multiple),
        features=first.features & second.features,
        graph=min(first.graph, second.graph, key=GRAPH_SUPPORT.index),
        packages=tuple(dict.fromkeys(first.packages + second.packages)),
        kv_layout=first.kv_layout if first.kv_layout == second.kv_layout else "",
        requires=first.requires | second.requires,
        priority=min(first.priority, second.priority),
    )


def choose(kind: str, name: str, verdicts: list[Verdict], options: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The plugin to use among `verdicts` (one per registered plugin of the kind).

    Args:
        name: a plugin's name, which must be able to serve the run, or `auto` for the usable one of highest priority.
        options: those given for it, which may be why it cannot.

    Raises:
        UserError: the named plugin cannot serve the run (with the reasons and who can), or nothing can.
    """
    usable = [v for v in verdicts if not v.reasons]
    if name == "auto":
        if not usable:
            lines = [f"  {v.name}: {'; '.join(v.reasons)}" for v in verdicts]
            raise UserError(f"no {kind} plugin can serve this run:\n" + "\n".join(lines))
        return max(usable, key=lambda v: v.priority).name
    verdict = next(v for v in verdicts if v.name == name)
    if verdict.reasons:
        others = ", ".join(v.name for v in usable) or "none"
        given = ", ".join(f"{kind}.{option}={value}" for option, value in options.items())
        why = "; ".join(verdict.reasons) + (f" (with {given})" if given else "")
        raise UserError(f"{kind} plugin '{name}' cannot serve this run: {why}.\nThese can: {others}.")
    return name


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a parent of a dotted name is missing
        return False
