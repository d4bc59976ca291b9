"""Multi-token prediction: the module that a model was trained and published with drafts for it.

As with EAGLE the module's entry j, made of hidden state j and token j + 1, lies in slot j of its layer's cache. After each step
it runs once over the tokens of the step, prompts included, with the true hidden states; then it drafts by itself, one token
after another. What it stored on its own account is made anew once the tokens are verified.
"""

from dataclasses import dataclass

import torch

from lab.api import Capabilities, Draft, Proposer, ProposeView, StepView, Target, UserError, register

from ._bits import keeping_bits
from ._chain import Choice, LastStates, next_ids
from ._options import check_whole, head_folder


@register("spec", "mtp")
class Mtp(Proposer):
    """Drafts by the model's own multi-token-prediction module (MiMo, DeepSeek-V3)."""

    capabilities = Capabilities(devices={"cpu", "cuda"})
    observes = True
    lookahead = 1

    @dataclass(frozen=True)
    class Options:
        head: str | None = None  # folder with the module's weights; null: the model's own checkpoint
        num_drafts: int = 1  # tokens proposed for a row and step; from the second on the module goes on from its own result
        draw: bool = True  # for requests that sample: draw drafts from the module's distribution; false: its likeliest tokens

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if options.head is not None:
            head_folder(options.head)  # before the model is loaded
        check_whole("num_drafts", options.num_drafts)
        self.num_drafts = options.num_drafts
        self._last = LastStates()  # of the module's results

    @classmethod
    def capabilities_with(cls, options: Options) -> Capabilities:
        return keeping_bits(cls.capabilities, options)

    def bind(self, target: Target) -> None:
        super().bind(target)
        if self.num_drafts >= target.max_model_len:
            raise UserError(f"spec.num_drafts {self.num_drafts}: contexts have at most {target.max_model_len} tokens.")
        self._module = target.load_mtp(None if self.options.head is None else head_folder(self.options.head))
        self.attention_layers = self._module.attention_layers

    def observe(self, step: StepView) -> None:
        self._last.keep_kept(step, self._run(step.batch, step.hidden_TD, torch.from_numpy(next_ids(step))))

    def propose(self, view: ProposeView) -> Draft:
        num = min(self.num_drafts, int(view.limits_R.max(initial=0)))
        choice = Choice(view, num, self.target.config.vocab_size, self.target.device, self.options.draw, None)
        if num == 0:
            return choice.draft()
        hidden_RD = self._last.of(view.rows_R)
        ids_R = choice.choose(self._module, hidden_RD)
        for batch in self.cache.chain(view.rows_R, view.lengths_R - 1, num - 1):
            hidden_RD = self._run(batch, hidden_RD, ids_R)
            ids_R = choice.choose(self._module, hidden_RD)
        return choice.draft()

    def _run(self, batch: object, states_TD: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        with self.cache.running(batch):
            return self._module(states_TD, self.target.embed(ids_T.to(self.target.device)), batch.positions_T)
