"""Contract checks of expert kernels: against the definition, expert by expert in float64."""

from typing import Any

import torch
from torch.nn import functional

from lab.checks import CheckFailed, NotDeclared
from lab.errors import UserError
from lab.registry import Entry

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of the largest output


def check_declares_what_it_does(entry: Entry, options: Any) -> None:
    """A kernel without the feature `moe` refuses experts in words of its own; one with it takes them."""
    kernel = entry.load()(options)
    w13_EGD, w2_EDF = _weights(2, 16, 8, torch.float32)
    try:
        kernel.pack(w13_EGD, w2_EDF)
    except UserError:
        if _runs_experts(entry):
            raise CheckFailed("it declares the feature 'moe', but refuses experts") from None
    else:
        if not _runs_experts(entry):
            raise CheckFailed("it takes experts, but does not declare the feature 'moe'")


def check_experts(entry: Entry, options: Any) -> None:
    """The gated sum over a token's experts, for 0 to 33 tokens, 1 to 4 experts a token and every declared dtype."""
    if not _runs_experts(entry):
        raise NotDeclared("no feature moe")
    declared = entry.capabilities.dtypes or frozenset(DTYPES)
    for dtype in (dtype for name, dtype in DTYPES.items() if name in declared):
        for num_tokens, num_experts, active in ((1, 4, 1), (5, 8, 2), (33, 8, 4), (0, 4, 2)):
            _compare(entry, options, num_tokens, num_experts, active, dtype)


def check_experts_elsewhere(entry: Entry, options: Any) -> None:
    """An expert with id -1 is not on this rank and adds nothing, even when its gate is not zero."""
    if not _runs_experts(entry):
        raise NotDeclared("no feature moe")
    _compare(entry, options, 7, 4, 2, torch.float32, drop=True)


def _runs_experts(entry: Entry) -> bool:
    return "moe" in entry.capabilities.features


def _weights(num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_experts)
    w13_EGD = torch.randn(num_experts, 2 * inner, hidden, generator=generator) / hidden**0.5
    w2_EDF = torch.randn(num_experts, hidden, inner, generator=generator) / inner**0.5
    return w13_EGD.to(dtype), w2_EDF.to(dtype)


def _compare(
    entry: Entry, options: Any, num_tokens: int, num_experts: int, active: int, dtype: torch.dtype, *, drop: bool = False
) -> None:
    hidden, inner = 64, 96
    generator = torch.Generator().manual_seed(num_tokens)
    w13_EGD, w2_EDF = _weights(num_experts, hidden, inner, dtype)
    x_TD = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    scores_TE = torch.randn(num_tokens, num_experts, generator=generator)
    gates_TA, ids_TA = scores_TE.softmax(-1).topk(active, dim=-1)
    if drop:
        ids_TA[::2, 0] = -1
    expected = _reference(x_TD, ids_TA, gates_TA, w13_EGD, w2_EDF)
    kernel = entry.load()(options)
    y_TD = kernel.experts(x_TD, ids_TA, gates_TA, kernel.pack(w13_EGD.clone(), w2_EDF.clone()))
    if y_TD.shape != x_TD.shape or y_TD.dtype != dtype:
        raise CheckFailed(f"experts returns {y_TD.dtype} of shape {list(y_TD.shape)} for {dtype} of {list(x_TD.shape)}")
    if num_tokens == 0:
        return
    difference = (y_TD.double() - expected).abs().max().item()
    limit = TOLERANCE[dtype] * max(expected.abs().max().item(), 1.0)
    if not difference <= limit:
        raise CheckFailed(
            f"experts differs from the definition for {num_tokens} tokens, {active} of {num_experts} experts ({dtype}): "
            f"by up to {difference:.3g}, allowed is {limit:.3g}"
        )


def _reference(
    x_TD: torch.Tensor, ids_TA: torch.Tensor, gates_TA: torch.Tensor, w13_EGD: torch.Tensor, w2_EDF: torch.Tensor
) -> torch.Tensor:
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for token, (ids, gates) in enumerate(zip(ids_TA.tolist(), gates_TA.tolist(), strict=True)):
        for expert, gate in zip(ids, gates, strict=True):
            if expert >= 0:
                gate_F, up_F = (w13_EGD[expert].double() @ x_TD[token].double()).chunk(2)
                y_TD[token] += gate * (w2_EDF[expert].double() @ (functional.silu(gate_F) * up_F))
    return y_TD
