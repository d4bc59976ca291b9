"""The ranges of keys and values: how large they get in each layer and KV head while an engine works."""

from collections.abc import Callable
from typing import Any

import torch

from lab.engine.engine import Engine
from lab.kv.scales import Ranges


class RangeWatch:
    """Watches what an engine writes into its KV cache, from now on.

    The engine must run no captured graphs, and no two of its layers may share a tensor.
    """

    def __init__(self, engine: Engine) -> None:
        self._model = engine.facts.model_name
        self._highest: dict[int, torch.Tensor] = {}  # of each layer's cache, by its address: highest_2K
        self._num_tokens = 0
        engine.watch(lambda _, call: call, self._watch)

    def ranges(self, *, per_head: bool) -> Ranges:
        """What was seen so far, of each KV head or of all heads together."""
        found = [highest_2K if per_head else highest_2K.amax(1, keepdim=True) for highest_2K in self._highest.values()]
        keys, values = ([highest_2K[half].tolist() for highest_2K in found] for half in (0, 1))
        return Ranges(self._model, self._num_tokens // max(len(found), 1), keys, values)

    def _watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return self._seeing(call) if name == "attention write" else call

    def _seeing(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def run(k_TKH: torch.Tensor, v_TKH: torch.Tensor, kv: torch.Tensor, slots_T: torch.Tensor) -> None:
            write(k_TKH, v_TKH, kv, slots_T)
            is_real_T = slots_T >= 0
            highest_2K = torch.stack([x[is_real_T].abs().amax((0, 2)).float() for x in (k_TKH, v_TKH)])
            before = self._highest.setdefault(kv.data_ptr(), highest_2K)  # a step goes through the layers in their order
            self._highest[kv.data_ptr()] = torch.maximum(before, highest_2K)
            self._num_tokens += int(is_real_T.sum())

        return run
