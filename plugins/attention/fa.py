"""The package flash-attn, for those who have it: its varlen kernel over the paged cache.

Its paged kernels take blocks of a multiple of 256 tokens: cache.block_size=256.
"""

from dataclasses import dataclass
from typing import Any

import torch

from lab.api import AttentionSpec, Capabilities, register

from ._paged import PlainPaged


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows as the kernel takes them, and how many of the step's tokens are theirs."""

    num_tokens: int
    q_start_R1: torch.Tensor  # int32
    k_start_R1: torch.Tensor  # int32: contexts end to end; only their lengths are read
    max_q: int
    max_ctx: int
    blocks_RM: torch.Tensor  # int32


@register("attention", "fa")
class FlashAttn(PlainPaged):
    """flash-attn 2 from its package: needs flash_attn installed, a CUDA device, and cache.block_size=256."""

    capabilities = Capabilities(
        devices={"cuda"},
        dtypes={"bfloat16", "float16"},
        kv_dtypes={"bfloat16", "float16"},
        head_dims=set(range(8, 257, 8)),
        block_multiple=256,
        features={"gqa", "sliding_window", "softcap", "spec_verify"},
        packages=("flash_attn",),
        kv_layout="2PBKH",
        priority=7,
    )

    def __init__(self, options: Any, spec: AttentionSpec) -> None:
        super().__init__(options, spec)
        from flash_attn import flash_attn_varlen_func

        self._kernel = flash_attn_varlen_func
        window = spec.sliding_window
        self._window = (-1, -1) if window is None else (window - 1, 0)  # tokens before and after, itself not counted

    def plan(self, batch: Any, reuse: Any = None) -> Plan:
        ctx_len_R = batch.ctx_len_R[: batch.num_rows]
        return Plan(
            num_tokens=int(batch.q_start_R1_cpu[-1]),
            q_start_R1=batch.q_start_R1[: batch.num_rows + 1],
            k_start_R1=torch.nn.functional.pad(ctx_len_R.cumsum(0, dtype=torch.int32), (1, 0)),
            max_q=batch.max_q,
            max_ctx=batch.max_ctx,
            blocks_RM=batch.blocks_RM[: batch.num_rows],
        )

    def attend(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor) -> None:
        out_TNH[: plan.num_tokens] = self._kernel(
            q_TNH[: plan.num_tokens],
            kv[0],
            kv[1],
            plan.q_start_R1,
            plan.k_start_R1,
            plan.max_q,
            plan.max_ctx,
            softmax_scale=self.spec.scale,
            causal=True,  # aligned to the last key: the row's queries are its last tokens
            window_size=self._window,
            softcap=self.spec.softcap or 0.0,
            block_table=plan.blocks_RM,
        )
        out_TNH[plan.num_tokens :] = 0
