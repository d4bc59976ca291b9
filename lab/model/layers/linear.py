"""Linear layers: how weights are stored and applied is the business of a quant plugin."""

import torch
from torch import nn

from lab.contracts.quant import LinearSpec, Quant
from lab.model.checkpoint import Checkpoint


class Linear(nn.Module):
    """y_TO = x_TI @ w_OI^T (+ bias), in the weight format of `quant`."""

    def __init__(self, spec: LinearSpec, quant: Quant) -> None:
        super().__init__()
        self.spec = spec
        self.quant = quant
        self._names: tuple[str, ...] = ()
        self._opaque: dict[str, torch.Tensor] = {}  # layouts that cannot be buffers of a compiled module
        self.register_buffer("bias", None, persistent=False)

    def load(self, checkpoint: Checkpoint) -> None:
        """Read the layer's tensors part by part into place, then repack them. What was read is freed here."""
        spec = self.spec
        loaded = {}
        for suffix, param in self.quant.params(spec).items():
            tensor = loaded[suffix] = torch.empty(param.shape, dtype=param.dtype, device=spec.device)
            start = 0
            for part, rows in spec.parts:
                if param.shard_dim is None:
                    checkpoint.read(f"{part}.{suffix}", tensor)
                    continue
                size = param.shape[param.shard_dim] * rows // spec.out_features
                checkpoint.read(f"{part}.{suffix}", tensor.narrow(param.shard_dim, start, size))
                start += size
        if spec.bias:
            self.bias = torch.empty(spec.out_features, dtype=spec.dtype, device=spec.device)
            start = 0
            for part, rows in spec.parts:
                checkpoint.read(f"{part}.bias", self.bias[start : start + rows])
                start += rows
        self.keep(self.quant.finish(loaded, spec))

    def keep(self, finished: dict[str, torch.Tensor]) -> None:
        """Take the finished tensors as the layer's weights."""
        self._names = tuple(name for name, tensor in finished.items() if tensor.layout is torch.strided)
        for name in self._names:
            self.register_buffer(f"w_{name}", finished[name], persistent=False)
        self._opaque = {name: tensor for name, tensor in finished.items() if name not in self._names}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The finished tensors, as the quant plugin returned them."""
        return {name: getattr(self, f"w_{name}") for name in self._names} | self._opaque

    @property
    def num_bytes(self) -> int:
        tensors = [*self.weights.values(), *([] if self.bias is None else [self.bias])]
        return sum(t.numel() * t.element_size() for t in tensors)

    def argmax(self, x_TI: torch.Tensor) -> torch.Tensor | None:
        """ids_T of the largest output of each row, as Quant.argmax has it; None where that has to be read off the outputs."""
        return None if self.bias is not None else self.quant.argmax(self.weights, x_TI, self.spec)

    def gated(self, x_TI: torch.Tensor) -> torch.Tensor | None:
        """silu(gate) * up of a layer that was built `gated`; None where its format has no such product."""
        return self.quant.gated(self.weights, x_TI, self.spec) if self.spec.gated else None

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        y_TO = self.quant.apply(self.weights, x_TI, self.spec)
        return y_TO if self.bias is None else y_TO + self.bias
