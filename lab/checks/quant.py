"""Contract checks of weight formats: the product against the weights that the plugin itself reads back."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from lab.checks import CheckFailed, NotDeclared
from lab.contracts.quant import LinearSpec, Quant
from lab.errors import UserError
from lab.model.checkpoint import Checkpoint
from lab.model.layers.linear import Linear
from lab.registry import Entry

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest output
SHAPES = ((64, 64), (64, 192), (128, 320), (576, 192), (1536, 576))  # (in, out); divisible by common group sizes
Parts = tuple[tuple[str, int], ...]
NUM_TOKENS = (1, 2, 7, 33, 256)


def check_product(entry: Entry, options: Any) -> None:
    """`apply` equals x @ dequantize^T, for several shapes and every declared dtype, from 1 to 256 tokens."""
    for dtype in _dtypes(entry):
        for in_features, out_features in SHAPES:
            quant = entry.load()(options)
            spec = _spec(quant, in_features, out_features, dtype)
            w = quant.finish(_random_tensors(quant, spec), spec)
            for num_tokens in NUM_TOKENS:
                _compare(quant, w, _input(num_tokens, spec), spec)


def check_odd_shapes(entry: Entry, options: Any) -> None:
    """Sizes that are no multiple of anything: right, unless `params` refuses them with a UserError of its own."""
    for in_features, out_features in ((72, 50), (100, 33), (1, 7), (31, 1)):
        quant = entry.load()(options)
        spec = _spec(quant, in_features, out_features, _dtypes(entry)[0])
        try:
            tensors = _random_tensors(quant, spec)
        except UserError:
            continue
        w = quant.finish(tensors, spec)
        for num_tokens in (1, 5):
            _compare(quant, w, _input(num_tokens, spec), spec)


def check_no_tokens(entry: Entry, options: Any) -> None:
    """A step may hold no token for a layer: the output then has no rows, and the right width."""
    quant, spec, w = _layer(entry, options)
    y_TO = quant.apply(w, _input(0, spec), spec)
    if y_TO.shape != (0, spec.out_features):
        raise CheckFailed(f"for no tokens apply returns shape {list(y_TO.shape)}, not [0, {spec.out_features}]")


def check_dequantize(entry: Entry, options: Any) -> None:
    """`dequantize` returns finite float32 of shape (out, in)."""
    quant, spec, w = _layer(entry, options)
    w_OI = quant.dequantize(w, spec)
    if w_OI.dtype != torch.float32 or w_OI.shape != (spec.out_features, spec.in_features):
        raise CheckFailed(
            f"dequantize returns {w_OI.dtype} of shape {list(w_OI.shape)}, not float32 of "
            f"[{spec.out_features}, {spec.in_features}]"
        )
    if not w_OI.isfinite().all():
        raise CheckFailed("dequantize returns values that are not finite")


def check_leaves_inputs_alone(entry: Entry, options: Any) -> None:
    """`apply` changes neither its input nor the weights: called twice it gives the same."""
    quant, spec, w = _layer(entry, options)
    x_TI = _input(5, spec)
    before, weights = x_TI.clone(), quant.dequantize(w, spec)
    first = quant.apply(w, x_TI, spec).clone()
    second = quant.apply(w, x_TI, spec)
    if not torch.equal(x_TI, before):
        raise CheckFailed("apply changes its input")
    if not torch.equal(quant.dequantize(w, spec), weights) or not torch.equal(first, second):
        raise CheckFailed("apply changes the weights: a second call gives something else")


def check_layers_apart(entry: Entry, options: Any) -> None:
    """Several layers of one plugin object keep their own weights, whatever the order in which they are used."""
    quant = entry.load()(options)
    dtype = _dtypes(entry)[0]
    specs = [_spec(quant, 64, 192, dtype), _spec(quant, 64, 192, dtype), _spec(quant, 192, 64, dtype)]
    finished = [quant.finish(_random_tensors(quant, spec, seed), spec) for seed, spec in enumerate(specs)]
    for i in (2, 0, 1, 0):
        _compare(quant, finished[i], _input(3, specs[i]), specs[i])
    if torch.equal(quant.dequantize(finished[0], specs[0]), quant.dequantize(finished[1], specs[1])):
        raise CheckFailed("two layers of equal shape read back the same weights, though they were loaded with different ones")


def check_fused_parts(entry: Entry, options: Any) -> None:
    """A layer fused of parts of unequal size equals the parts one by one."""
    quant = entry.load()(options)
    dtype = _dtypes(entry)[0]
    parts = (("q", 192), ("k", 64), ("v", 128))
    source = _Memory(quant, 64, dtype, parts)
    fused = _load(quant, source, parts, dtype)
    whole_OI = quant.dequantize(fused.weights, fused.spec)
    separate = [_load(quant, source, (part,), dtype) for part in parts]
    joined_OI = torch.cat([quant.dequantize(layer.weights, layer.spec) for layer in separate])
    if not torch.allclose(whole_OI, joined_OI, rtol=1e-5, atol=1e-6):
        raise CheckFailed("the weights of a fused layer differ from those of its parts; is shard_dim right in `params`?")
    _compare(quant, fused.weights, _input(3, fused.spec), fused.spec)


def check_bias(entry: Entry, options: Any) -> None:
    """The bias is added once, by the layer: `apply` leaves it out."""
    quant = entry.load()(options)
    dtype = _dtypes(entry)[0]
    parts = (("a", 64), ("b", 128))
    layer = _load(quant, _Memory(quant, 64, dtype, parts), parts, dtype, bias=True)
    x_TI = _input(4, layer.spec)
    expected = quant.apply(layer.weights, x_TI, layer.spec).float() + layer.bias.float()
    _close(layer(x_TI).float(), expected, dtype, "the layer's output is not apply's plus the bias")


def check_argmax(entry: Entry, options: Any) -> None:
    """`argmax`, where it is offered, names the first of the largest entries of `apply`, as it rounds them."""
    for dtype in _dtypes(entry):
        quant = entry.load()(options)
        spec = _spec(quant, 64, 320, dtype)
        w = quant.finish(_random_tensors(quant, spec), spec)
        for num_tokens in NUM_TOKENS:
            x_TI = _input(num_tokens, spec)
            x_TI[-1] = 0  # all outputs are equal
            found = quant.argmax(w, x_TI, spec)
            if found is None:
                return
            expected = quant.apply(w, x_TI, spec).float().argmax(-1)
            if found.dtype != torch.int64 or found.tolist() != expected.tolist():
                raise CheckFailed(f"argmax is not that of apply for {num_tokens} tokens in {dtype}")


def check_gated(entry: Entry, options: Any) -> None:
    """`gated`, where it is offered, is silu(gate) * up of `apply`; a gated layer's `apply` and `dequantize` stay in order."""
    for dtype in _dtypes(entry):
        quant = entry.load()(options)
        spec = replace(_spec(quant, 64, 320, dtype), gated=True)
        tensors = _random_tensors(quant, spec)
        w = quant.finish({name: tensor.clone() for name, tensor in tensors.items()}, spec)
        plain = replace(spec, gated=False)
        weight_OI = quant.dequantize(quant.finish(tensors, plain), plain)
        _close(quant.dequantize(w, spec), weight_OI, torch.float32, "a gated layer's weight is not that of a plain one")
        for num_tokens in NUM_TOKENS:
            x_TI = _input(num_tokens, spec)
            _compare(quant, w, x_TI, spec)
            found = quant.gated(w, x_TI, spec)
            if found is not None:
                gate_TF, up_TF = quant.apply(w, x_TI, spec).chunk(2, dim=-1)
                expected = torch.nn.functional.silu(gate_TF) * up_TF
                _close(found.float(), expected.float(), dtype, f"gated is not that of apply for {num_tokens} tokens")


def check_batch_invariance(entry: Entry, options: Any) -> None:
    """If declared: asked to, it gives a row the same bits alone and beside any number of others."""
    if "batch_invariant" not in entry.capabilities.features:
        raise NotDeclared("no feature batch_invariant")
    for dtype in _dtypes(entry):
        quant = entry.load()(options)
        spec = replace(_spec(quant, 608, 320, dtype), gated=True, batch_invariant=True)
        try:
            w = quant.finish(_random_tensors(quant, spec), spec)
        except UserError:
            continue  # it says so before a run begins
        x_TI = _input(600, spec)
        for product in (quant.apply, quant.gated):
            wanted = product(w, x_TI, spec)
            if wanted is None:
                continue
            for first, last in ((0, 1), (599, 600), (1, 3), (7, 24), (100, 133), (0, 300), (41, 600)):
                if not torch.equal(product(w, x_TI[first:last], spec), wanted[first:last]):
                    raise CheckFailed(
                        f"{product.__name__} of {last - first} rows in {dtype} has other bits than the same rows among 600"
                    )


def check_traceable(entry: Entry, options: Any) -> None:
    """torch.compile takes `apply` into one graph without a break, for any number of tokens."""
    quant, spec, w = _layer(entry, options)
    layer = Linear(spec, quant)
    layer.keep(w)
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for num_tokens in (5, 9):
            x_TI = _input(num_tokens, spec)
            _close(compiled(x_TI).float(), layer(x_TI).float(), spec.dtype, "the compiled layer gives something else")


class _Memory(Checkpoint):
    """A checkpoint in memory with the given parts, filled with random tensors as the plugin's `params` wants them."""

    def __init__(self, quant: Quant, in_features: int, dtype: torch.dtype, parts: Parts) -> None:
        super().__init__()
        self.tensors = {}
        for seed, (part, rows) in enumerate(parts):
            spec = _spec(quant, in_features, rows, dtype)
            for suffix, tensor in _random_tensors(quant, spec, seed).items():
                self.tensors[f"{part}.{suffix}"] = tensor
            self.tensors[f"{part}.bias"] = torch.randn(rows, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def _read(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self.tensors[name])

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def file_of(self, name: str) -> str:
        return "memory"

    def close(self) -> None:
        """There are no files."""


def _load(quant: Quant, source: Checkpoint, parts: Parts, dtype: torch.dtype, *, bias: bool = False) -> Linear:
    rows = sum(size for _, size in parts)
    layer = Linear(LinearSpec("layer", 64, rows, dtype, _device(quant), parts, bias), quant)
    layer.load(source)
    return layer


def _device(quant: Quant) -> torch.device:
    """The CPU, or the device that the plugin is for."""
    devices = quant.capabilities.devices
    if not devices or "cpu" in devices:
        return torch.device("cpu")
    if "cuda" in devices and torch.cuda.is_available():
        return torch.device("cuda")
    raise CheckFailed(f"it runs on {', '.join(sorted(devices))}, which this machine does not have")


def _layer(entry: Entry, options: Any) -> tuple[Quant, LinearSpec, dict[str, torch.Tensor]]:
    quant = entry.load()(options)
    spec = _spec(quant, 64, 192, _dtypes(entry)[0])
    return quant, spec, quant.finish(_random_tensors(quant, spec), spec)


def _spec(quant: Quant, in_features: int, out_features: int, dtype: torch.dtype) -> LinearSpec:
    return LinearSpec("layer", in_features, out_features, dtype, _device(quant), (("layer", out_features),))


def _random_tensors(quant: Quant, spec: LinearSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for suffix, param in quant.params(spec).items():
        if param.dtype.is_floating_point:
            tensors[suffix] = torch.randn(param.shape, generator=generator).to(spec.device, param.dtype)
        else:
            info = torch.iinfo(param.dtype)
            values = torch.randint(info.min, info.max, param.shape, generator=generator, dtype=torch.int64)
            tensors[suffix] = values.to(spec.device, param.dtype)
    return tensors


def _input(num_tokens: int, spec: LinearSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, spec.in_features, generator=generator).to(spec.device, spec.dtype)


def _compare(quant: Quant, w: dict[str, torch.Tensor], x_TI: torch.Tensor, spec: LinearSpec) -> None:
    expected = (x_TI.double() @ quant.dequantize(w, spec).double().T).float()
    y_TO = quant.apply(w, x_TI, spec)
    if y_TO.dtype != spec.dtype or y_TO.shape != expected.shape:
        raise CheckFailed(f"apply returns {y_TO.dtype} of shape {list(y_TO.shape)} for {x_TI.dtype} of {list(x_TI.shape)}")
    what = f"apply differs from x @ dequantize^T for {x_TI.shape[0]} tokens, {spec.in_features} to {spec.out_features} features"
    _close(y_TO.float(), expected, spec.dtype, what)


def _close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    difference = (found - expected).abs().max().item()
    limit = TOLERANCE[dtype] * max(expected.abs().max().item(), 1.0)
    if not difference <= limit:
        raise CheckFailed(f"{what} ({dtype}): by up to {difference:.3g}, allowed is {limit:.3g}")


def _dtypes(entry: Entry) -> list[torch.dtype]:
    declared = entry.capabilities.dtypes or frozenset(DTYPES)
    return [dtype for name, dtype in DTYPES.items() if name in declared]
