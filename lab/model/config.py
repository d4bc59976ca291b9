"""The shape of a model, read from a checkpoint's config.json. Torch-free.

`read_config` resolves everything that config.json may leave open (defaults of the architecture, old and new spellings), so
that no other module needs to look into the raw values.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lab.errors import UserError, unknown
from lab.model.architectures import Architecture, find_architecture

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
OF_WHOLE_MODEL = (
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: base frequency, and how the frequencies are scaled for contexts longer than those of training.

    The fields after `factor` belong to one kind each (named in their comment) and are unused by the others.
    """

    theta: float
    rotary_dim: int  # the leading entries of a head that are rotated; head_dim unless rotary is partial
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0  # llama3, yarn, longrope: the context length of training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    short_factor: tuple[float, ...] = ()  # longrope: for contexts up to original_max_position
    long_factor: tuple[float, ...] = ()  # longrope: for longer ones


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. Sizes are in elements."""

    architecture: str  # as in lab.model.architectures: llama, qwen2, ...
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    torch_dtype: str  # float32 | bfloat16 | float16
    eos_ids: frozenset[int]  # of config.json and generation_config.json together
    layer_windows: tuple[int | None, ...]  # per layer: how many tokens it sees, itself included; None is all
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused_checkpoint: bool = False  # the checkpoint's qkv and gate_up projections are one tensor each
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    attention_softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    logits_softcap: float | None = None
    output_norms: bool = False  # what attention and feed-forward give is normalised before it is added
    norm_offset: bool = False  # norms multiply by one more than the checkpoint's weight
    scaled_embedding: bool = False  # embeddings are multiplied by the root of hidden_size
    local_rope: RopeConfig | None = None  # of the layers with a window, where they have one of their own
    image_parts: tuple[str, ...] = ()  # parts of the checkpoint that are for images and are left out
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # config.json

    @property
    def sliding_window(self) -> int | None:
        """The smallest window of any layer, None when every layer sees all."""
        return min((w for w in self.layer_windows if w is not None), default=None)


def read_config(folder: Path) -> ModelConfig:
    """The config of the checkpoint in `folder`.

    Raises:
        UserError: config.json is missing, is not JSON, names an unknown architecture, or has an impossible value.
    """
    path = Path(folder) / "config.json"
    raw = read_json(path)
    _, architecture = find_architecture(raw, str(path))
    if architecture.image_parts:
        raw = _text_part(path, raw)
    generation_path = Path(folder) / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return _Reader(path, raw, architecture).config(_eos_ids(generation, generation_path))


def _text_part(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The values of the text part of a model that takes images too; what is said of the whole model goes first."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"{path}: 'text_config' must be an object: the text part's values.")
    return {**text, **{name: value for name, value in raw.items() if name in OF_WHOLE_MODEL}}


def read_config_as(architecture: str, path: Path, raw: dict[str, Any]) -> ModelConfig:
    """The shape in `raw`, read from `path`, as one of `architecture` whatever it calls itself. Raises as `read_config`."""
    _, known = find_architecture({**raw, "architectures": [architecture]}, str(path))
    return _Reader(path, raw, known).config(frozenset())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError naming the file, and the line when it does not parse."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}: it is not a model folder in transformers' format.") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(data).__name__}.")
    return data


class _Reader:
    """Reads the values of one config.json, each checked as it is read."""

    def __init__(self, path: Path, raw: dict[str, Any], architecture: Architecture) -> None:
        self.path = path
        self.raw = raw
        self.architecture = architecture

    def config(self, eos_ids: frozenset[int]) -> ModelConfig:
        num_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", num_heads)
        hidden_size = self.integer("hidden_size")
        if num_heads % num_kv_heads:
            raise self.error("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
        if self.value("head_dim") is None and hidden_size % num_heads:
            raise self.error("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
        self._refuse_unsupported()

        architecture = self.architecture
        head_dim = self.integer("head_dim", hidden_size // num_heads)
        num_layers = self.integer("num_hidden_layers")
        attention_bias = self.flag("attention_bias")
        rope, local_rope = self.ropes(head_dim)
        return ModelConfig(
            architecture=architecture.name,
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6),
            rope=rope,
            max_position_embeddings=self.integer("max_position_embeddings"),
            tie_word_embeddings=self.flag("tie_word_embeddings"),
            torch_dtype=self.dtype(),
            eos_ids=eos_ids | _eos_ids({"eos_token_id": self.value("eos_token_id")}, self.path),
            layer_windows=self.windows(num_layers),
            qkv_bias=architecture.qkv_bias or attention_bias,
            output_bias=attention_bias and not architecture.qkv_bias,
            mlp_bias=self.flag("mlp_bias"),
            qk_norm=architecture.qk_norm,
            fused_checkpoint=architecture.fused_checkpoint,
            activation=architecture.activation,
            attention_scale=self.attention_scale(),
            attention_softcap=self.softcap("attn_logit_softcapping"),
            logits_softcap=self.softcap("final_logit_softcapping"),
            output_norms=architecture.output_norms,
            norm_offset=architecture.norm_offset,
            scaled_embedding=architecture.scaled_embedding,
            local_rope=local_rope,
            image_parts=architecture.image_parts,
            raw=self.raw,
        )

    def _refuse_unsupported(self) -> None:
        name, wanted = self.architecture.name, self.architecture.activation
        key = "hidden_act" if wanted == "silu" else "hidden_activation"
        if (activation := self.value(key) or wanted) != wanted:
            raise self.error(key, f"'{activation}' is not supported; {name} runs with '{wanted}'")
        if self.flag("use_bidirectional_attention"):
            raise self.error("use_bidirectional_attention", "is not supported: tokens see those before them only")

    def attention_scale(self) -> float | None:
        scalar = self.value("query_pre_attn_scalar") if "query_pre_attn_scalar" in self.architecture.defaults else None
        return None if scalar is None else self.checked_number("query_pre_attn_scalar", scalar) ** -0.5

    def softcap(self, name: str) -> float | None:
        found = self.value(name) if name in self.architecture.defaults else None
        return None if found is None else self.checked_number(name, found)

    def value(self, name: str, default: Any = None) -> Any:
        """The value of config.json, where it stands there (even as null); else the architecture's; else `default`."""
        if name in self.raw:
            return self.raw[name]
        return self.architecture.defaults.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        found = self.value(name, default)
        found = default if found is None else found
        if found is None:
            raise self.error(name, "is missing")
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise self.error(name, f"must be a positive integer, not {found!r}")
        return found

    def number(self, name: str, default: float) -> float:
        return self.checked_number(name, self.value(name, default))

    def checked_number(self, name: str, found: Any) -> float:
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found) or found <= 0:
            raise self.error(name, f"must be a positive number, not {found!r}")
        return float(found)

    def flag(self, name: str) -> bool:
        found = self.value(name, False)
        if found is not None and not isinstance(found, bool):
            raise self.error(name, f"must be true or false, not {found!r}")
        return bool(found)

    def dtype(self) -> str:
        found = self.value("dtype") or self.value("torch_dtype") or "float32"
        name = str(found).removeprefix("torch.")
        if name not in DTYPES:
            raise self.error("dtype" if self.value("dtype") else "torch_dtype", f"'{found}' is not one of {', '.join(DTYPES)}")
        return name

    def windows(self, num_layers: int) -> tuple[int | None, ...]:
        """How far each layer sees, in the rules of the architecture's modelling code in transformers."""
        window = self.value("sliding_window")
        if self.architecture.window_from_layer and not self.flag("use_sliding_window"):
            window = None
        if window is None:
            return (None,) * num_layers
        window = self.integer("sliding_window")
        if self.architecture.name == "llama":
            return (None,) * num_layers  # the key is sometimes there, and means nothing
        every = self.architecture.full_every and self.integer("sliding_window_pattern", self.architecture.full_every)
        if not self.architecture.window_from_layer and not every:
            return (window,) * num_layers
        types = self.value("layer_types")
        if types is None:
            first = 0 if every else self.value("max_window_layers")
            sliding = [bool((layer + 1) % every) if every else layer >= first for layer in range(num_layers)]
            types = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding]
        if len(types) != num_layers:
            raise self.error("layer_types", f"has {len(types)} entries for {num_layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in types)

    def ropes(self, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
        """Rotary settings: `rope_parameters`, or the older `rope_scaling` beside a `rope_theta` of its own.

        The second are those of the layers with a window, where they have their own: then `rope_parameters` has both, by kind of
        layer, and the older spelling is for the others.
        """
        name = "rope_scaling" if self.value("rope_scaling") else "rope_parameters"
        values = self.value(name) or {}
        if not isinstance(values, dict):
            raise self.error(name, f"must be an object, not {values!r}")
        theta = self.value("rope_theta") or 10000.0
        local_theta = self.architecture.local_theta
        if local_theta is None:
            return self.rope(name, values, theta, head_dim), None
        both = self.value("rope_parameters") or {}
        local = both.get("sliding_attention") or {} if isinstance(both, dict) else {}
        if name == "rope_parameters":
            values = values.get("full_attention") or {}
        if not isinstance(values, dict) or not isinstance(local, dict):
            raise self.error("rope_parameters", "must have an object for each kind of layer")
        local_theta = self.value("rope_local_base_freq") or local_theta
        return self.rope(name, values, theta, head_dim), self.rope("rope_parameters", local, local_theta, head_dim)

    def rope(self, name: str, values: dict[str, Any], theta: Any, head_dim: int) -> RopeConfig:
        """The rope of these values, which stand in config.json under `name`."""
        kind = values.get("rope_type", values.get("type", "default")) or "default"
        kind = self.architecture.rope_aliases.get(kind, kind)
        if kind not in self.architecture.rope_kinds:
            raise UserError(f"{self.path}: {name}: {unknown('rope type', str(kind), self.architecture.rope_kinds)}")

        theta = self.checked_number("rope_theta", values.get("rope_theta") or theta)
        partial = values.get("partial_rotary_factor") or self.value("partial_rotary_factor") or 1.0
        if kind == "default" and not self.architecture.partial_rotary:
            partial = 1.0
        rotary_dim = int(head_dim * self.checked_number("partial_rotary_factor", partial))
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise self.error("partial_rotary_factor", f"{partial} of head_dim {head_dim} is not an even number of entries")
        if kind == "default":
            return RopeConfig(theta, rotary_dim)
        return self._scaled_rope(name, values, kind, theta, rotary_dim)

    def _scaled_rope(self, name: str, values: dict[str, Any], kind: RopeKind, theta: float, rotary_dim: int) -> RopeConfig:
        def number(key: str, default: float | None = None) -> float:
            found = values.get(key)
            return self.checked_number(f"{name}.{key}", default if found is None else found)

        if kind in ("linear", "dynamic"):
            return RopeConfig(theta, rotary_dim, kind, factor=number("factor"))

        limit = self.integer("max_position_embeddings")
        original = self.value("original_max_position_embeddings") or values.get("original_max_position_embeddings") or limit
        original = int(self.checked_number("original_max_position_embeddings", original))
        if kind == "llama3":
            return RopeConfig(
                theta,
                rotary_dim,
                kind,
                factor=number("factor"),
                original_max_position=original,
                low_freq_factor=number("low_freq_factor"),
                high_freq_factor=number("high_freq_factor"),
            )
        factor = number("factor", limit / original)
        if kind == "yarn":
            return RopeConfig(
                theta,
                rotary_dim,
                kind,
                factor=factor,
                original_max_position=original,
                beta_fast=values.get("beta_fast") or 32.0,
                beta_slow=values.get("beta_slow") or 1.0,
                truncate=bool(values.get("truncate", True)),
                attention_factor=number("attention_factor", _yarn_attention_factor(values, factor)),
            )
        plain = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        return RopeConfig(
            theta,
            rotary_dim,
            kind,
            factor=factor,
            original_max_position=original,
            attention_factor=number("attention_factor", plain),
            short_factor=self._factors(name, values, "short_factor", rotary_dim),
            long_factor=self._factors(name, values, "long_factor", rotary_dim),
        )

    def _factors(self, name: str, values: dict[str, Any], key: str, rotary_dim: int) -> tuple[float, ...]:
        found = values.get(key)
        if not isinstance(found, list) or len(found) != rotary_dim // 2:
            raise self.error(f"{name}.{key}", f"must be a list of {rotary_dim // 2} numbers")
        return tuple(self.checked_number(f"{name}.{key}", x) for x in found)

    def error(self, name: str, problem: str) -> UserError:
        return UserError(f"{self.path}: '{name}' {problem}.")


def _yarn_attention_factor(values: dict[str, Any], factor: float) -> float:
    """The factor on cos and sin when config.json gives none (YaRN, https://arxiv.org/abs/2309.00071, section 3.4)."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = values.get("mscale"), values.get("mscale_all_dim")
    if numerator and denominator:
        return mscale(numerator) / mscale(denominator)
    return mscale(1.0)


def _eos_ids(values: dict[str, Any], path: Path) -> frozenset[int]:
    found = values.get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise UserError(f"{path}: 'eos_token_id' must be a token id or a list of them, not {found!r}.")
    return frozenset(ids)
