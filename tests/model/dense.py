"""The smallest thing that can stand behind `lab::attention`: plain attention over the keys and values seen so far."""

from types import SimpleNamespace

import torch

from lab import registry
from lab.context import ForwardContext, forward_context
from lab.model.config import read_config
from lab.model.load import load_model

registry.discover()


class DenseBackend:
    """One layer's attention for a single row, with lists for a cache."""

    def __init__(self, layer):
        self.layer = layer
        self.keys, self.values = [], []

    def write(self, k_TKH, v_TKH, kv, slots_T):
        self.keys.append(k_TKH.clone())
        self.values.append(v_TKH.clone())

    def attend(self, q_TNH, kv, plan, out_TNH):
        group = self.layer.num_heads // self.layer.num_kv_heads
        keys, values = (torch.cat(x).repeat_interleave(group, dim=1) for x in (self.keys, self.values))
        num_new, num_all = q_TNH.shape[0], keys.shape[0]
        scores = torch.einsum("tnh,snh->nts", q_TNH, keys) * self.layer.scale
        if self.layer.softcap is not None:
            scores = torch.tanh(scores / self.layer.softcap) * self.layer.softcap
        at, seen = torch.arange(num_all - num_new, num_all)[:, None], torch.arange(num_all)
        visible = seen <= at
        if self.layer.sliding_window is not None:
            visible &= seen > at - self.layer.sliding_window
        out_TNH.copy_(torch.einsum("nts,snh->tnh", scores.masked_fill(~visible, -torch.inf).softmax(-1), values))


class Session:
    """A model with the state of one sequence: feed it chunks, get the logits of each position."""

    def __init__(self, model):
        self.model = model
        backends = [DenseBackend(layer) for layer in model.attention_layers]
        nothing = [None] * len(backends)
        self.context = ForwardContext([SimpleNamespace(slots_T=None)] * len(backends), backends, nothing, nothing)
        self.position = 0

    def feed(self, token_ids) -> torch.Tensor:
        positions_T = torch.arange(self.position, self.position + len(token_ids))
        self.position += len(token_ids)
        with torch.inference_mode(), forward_context(self.context):
            return self.model.logits(self.model(torch.as_tensor(token_ids), positions_T))


def load(folder, *, dtype=torch.float32, load_format="auto", max_model_len=None, config=None):
    """The model of `folder` with the plain plugins."""
    quant, moe = (registry.get(kind, "none") for kind in ("quant", "moe"))
    return load_model(
        folder,
        config or read_config(folder),
        dtype=dtype,
        device=torch.device("cpu"),
        load_format=load_format,
        quant=quant.load()(quant.make_options({})),
        moe=moe.load()(moe.make_options({})),
        max_model_len=max_model_len,
    )


def logits_of(model, token_ids) -> torch.Tensor:
    return Session(model).feed(token_ids)


def dequantized(linear) -> torch.Tensor:
    """The weights of a linear layer, unpacked."""
    return linear.quant.dequantize(linear.weights, linear.spec)
