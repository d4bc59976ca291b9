"""A small model of the same vocabulary drafts: one token after another, with its own keys and values in the target's pool.

(Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", 2023.) After each step of the
target the model runs over the same tokens, so that its cache keeps up, and then goes on by itself.
"""

from dataclasses import dataclass

import torch

from lab.api import Capabilities, Draft, Proposer, ProposeView, StepView, Target, UserError, register

from ._bits import keeping_bits
from ._chain import Choice
from ._options import check_whole


@register("spec", "draft_model")
class DraftModel(Proposer):
    """Drafts by another, smaller model with the target's vocabulary."""

    capabilities = Capabilities(devices={"cpu", "cuda"})
    observes = True

    @dataclass(frozen=True)
    class Options:
        model: str | None = None  # as model.path names models; must be given
        num_drafts: int = 4  # tokens proposed for a row and step
        draw: bool = True  # for requests that sample: draw drafts from the model's distribution; false: its most likely tokens

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.model_path = options.model
        check_whole("num_drafts", options.num_drafts)
        self.num_drafts = options.num_drafts

    @classmethod
    def capabilities_with(cls, options: Options) -> Capabilities:
        return keeping_bits(cls.capabilities, options)

    def check_target(self, name: str) -> None:
        if self.options.model is None:
            raise UserError("spec.model must be given: the draft model, named as model.path names models.")

    def bind(self, target: Target) -> None:
        super().bind(target)
        self._model = target.load_model(self.options.model)
        self.attention_layers = self._model.attention_layers

    def observe(self, step: StepView) -> None:
        with self.cache.running(step.batch):
            self._model(step.batch.input_ids_T, step.batch.positions_T)

    def propose(self, view: ProposeView) -> Draft:
        num = min(self.num_drafts, int(view.limits_R.max(initial=0)))
        choice = Choice(view, num, self.target.config.vocab_size, self.target.device, self.options.draw, None)
        ids_R = torch.from_numpy(view.tokens_RC[view.rows_R, view.lengths_R - 1]).to(self.target.device)
        for batch in self.cache.chain(view.rows_R, view.lengths_R - 1, num):
            with self.cache.running(batch):
                hidden_RD = self._model(ids_R.int(), batch.positions_T)
            ids_R = choice.choose(self._model, hidden_RD)
        return choice.draft()
