"""The package FlashInfer, for those who have it: its batched prefill kernel over the paged cache, decodes included.

A row of one token is a prefill of one query, which is also what its decode wrapper runs where it uses tensor cores, and a mixed
step needs one plan.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lab.api import AttentionSpec, Capabilities, register

from ._paged import PlainPaged

WORKSPACE_BYTES = 128 << 20  # what FlashInfer asks for; partial results of split rows lie in it


@dataclass(frozen=True, slots=True)
class Plan:
    """FlashInfer keeps the plan itself; this says how many of the step's tokens it covers."""

    num_tokens: int


@register("attention", "flashinfer")
class FlashInfer(PlainPaged):
    """FlashInfer from its package: needs flashinfer installed, and a CUDA device."""

    capabilities = Capabilities(
        devices={"cuda"},
        dtypes={"bfloat16", "float16"},
        kv_dtypes={"bfloat16", "float16"},
        head_dims={64, 128, 256},
        features={"gqa", "sliding_window", "softcap", "spec_verify"},
        packages=("flashinfer",),
        kv_layout="2PBKH",
        priority=8,
    )

    def __init__(self, options: Any, spec: AttentionSpec) -> None:
        super().__init__(options, spec)
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def plan(self, batch: Any, reuse: Any = None) -> Plan:
        spec = self.spec
        # host tensors: it reads them on the host, and copies what the device needs
        self._wrapper.plan(
            torch.from_numpy(batch.q_start_R1_cpu),
            *pages(batch.ctx_len_R_cpu, batch.blocks_RM_cpu, spec.block_size),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.block_size,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
            logits_soft_cap=spec.softcap or 0.0,
            q_data_type=spec.dtype,
            kv_data_type=spec.kv_dtype,
        )
        return Plan(int(batch.q_start_R1_cpu[-1]))

    def attend(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor) -> None:
        real = slice(0, plan.num_tokens)
        self._wrapper.run(q_TNH[real], (kv[0], kv[1]), out=out_TNH[real])
        out_TNH[plan.num_tokens :] = 0


def pages(ctx_len_R: np.ndarray, blocks_RM: np.ndarray, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block table as FlashInfer takes it, int32 on the host: where each row's blocks begin in the list of all [R + 1],
    the list, and how many tokens of each row's last block are its own [R]."""
    num_blocks_R = -(-ctx_len_R // block_size)
    start_R1 = np.concatenate([[0], np.cumsum(num_blocks_R)]).astype(np.int32)
    listed = blocks_RM[np.arange(blocks_RM.shape[1]) < num_blocks_R[:, None]].astype(np.int32)
    last_R = (ctx_len_R - (num_blocks_R - 1) * block_size).astype(np.int32)
    return torch.from_numpy(start_R1), torch.from_numpy(listed), torch.from_numpy(last_R)
