"""For dense models, which have no experts."""

from typing import Any, NoReturn

import torch

from lab.api import Capabilities, Moe, UserError, register


@register("moe", "none")
class NoMoe(Moe):
    """No expert kernel. It lacks the feature `moe`, so a mixture-of-experts model is refused with this plugin."""

    capabilities = Capabilities(features={"batch_invariant"})

    def pack(self, w13_EGD: torch.Tensor, w2_EDF: torch.Tensor) -> NoReturn:
        raise _refusal()

    def experts(self, x_TD: torch.Tensor, ids_TA: torch.Tensor, gates_TA: torch.Tensor, w: Any) -> NoReturn:
        raise _refusal()


def _refusal() -> UserError:
    return UserError("moe plugin 'none' serves dense models only: choose another to run a mixture of experts.")
