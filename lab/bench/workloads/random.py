"""Random token ids with chosen lengths: for measurements where the text does not matter."""

import math
import random
from dataclasses import dataclass, field
from typing import Literal

from lab.bench.arrivals import ArrivalOptions, arrange
from lab.contracts.workload import ModelFacts, WorkItem, Workload
from lab.errors import UserError
from lab.registry import register


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """A distribution of lengths in tokens, cut off at min and max.

    fixed: always `mean`. uniform: every whole number from min to max alike. normal, lognormal: about `mean` (of the
    distribution before it is cut off) with a standard deviation of `spread` times the mean.
    """

    distribution: Literal["fixed", "uniform", "normal", "lognormal"] = "fixed"
    mean: float = 128
    spread: float = 0.5
    min: int = 1
    max: int | None = None

    def check(self, where: str) -> None:
        """Raises UserError naming the field below `where`."""
        if self.min < 1:
            raise UserError(f"{where}.min must be at least 1 token, got {self.min}.")
        if self.max is not None and self.max < self.min:
            raise UserError(f"{where}.max ({self.max}) is less than {where}.min ({self.min}).")
        if self.distribution == "uniform" and self.max is None:
            raise UserError(f"{where}.distribution=uniform needs {where}.max.")
        if not 1 <= self.mean < math.inf:
            raise UserError(f"{where}.mean must be at least 1 token, got {self.mean:g}.")
        if self.distribution == "fixed" and (self.mean < self.min or self.mean > (self.max or math.inf)):
            raise UserError(f"{where}.mean ({self.mean:g}) is not within {where}.min and {where}.max.")
        if not 0 <= self.spread < math.inf:
            raise UserError(f"{where}.spread must be 0 or more, got {self.spread:g}.")

    def draw(self, rng: random.Random) -> int:
        if self.distribution == "uniform":
            return rng.randint(self.min, self.max)
        value = self.mean
        if self.distribution == "normal":
            value = rng.gauss(self.mean, self.spread * self.mean)
        elif self.distribution == "lognormal":
            variance = math.log1p(self.spread**2)  # of the logarithm, so that the draws have this mean and spread
            value = rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        return int(min(max(round(value), self.min), self.max or math.inf))


@register("workload", "random")
class RandomWorkload(Workload):
    """Random token ids: length distributions, shared prefixes, arrivals; outputs of exact length."""

    @dataclass(frozen=True, kw_only=True)
    class Options(ArrivalOptions):
        """`arrival=file` means at once here: there is no file."""

        num_requests: int = 64
        input: Lengths = field(default_factory=Lengths)  # prompt tokens, the shared prefix not counted
        output: Lengths = field(default_factory=lambda: Lengths(mean=64))
        ignore_eos: bool = True  # generate to the drawn length whatever the model says
        prefix_len: int = 0  # tokens that come before every prompt
        num_prefixes: int = 1  # so many different ones, taken in turn

        def __post_init__(self) -> None:
            super().__post_init__()
            self.input.check("workload.input")
            self.output.check("workload.output")
            for name, least in (("num_requests", 1), ("prefix_len", 0), ("num_prefixes", 1)):
                if getattr(self, name) < least:
                    raise UserError(f"workload.{name} must be at least {least}, got {getattr(self, name)}.")

    def items(self, model: ModelFacts) -> list[WorkItem]:
        """Raises UserError when the vocabulary has nothing but special tokens, or a drawn length passes the context."""
        options = self.options
        rng = random.Random(f"random workload {self.seed}")
        ordinary = [token for token in range(model.vocab_size) if token not in model.special_ids]
        if not ordinary:
            raise UserError("workload=random: the model's vocabulary holds only special tokens.")
        prefixes = [rng.choices(ordinary, k=options.prefix_len) for _ in range(options.num_prefixes)]
        items = []
        for index in range(options.num_requests):
            num_input, num_output = options.input.draw(rng), options.output.draw(rng)
            prompt = prefixes[index % len(prefixes)] + rng.choices(ordinary, k=num_input)
            if len(prompt) + num_output > model.max_model_len:
                raise UserError(
                    f"workload=random: request {index} has {len(prompt)} prompt and {num_output} output tokens, more than the "
                    f"context of {model.max_model_len}. Set workload.input.max, workload.output.max or model.max_model_len."
                )
            sampling = {"max_tokens": num_output, "ignore_eos": options.ignore_eos}
            items.append(WorkItem(prompt_token_ids=prompt, sampling=sampling))
        return arrange(items, options, self.seed)
