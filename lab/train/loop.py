"""The training: batches in a fixed order, one optimiser, checkpoints from which it goes on exactly where it was."""

import contextlib
import itertools
import json
import logging
import math
import random
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lab.errors import UserError
from lab.interrupt import gentle_interrupt
from lab.model.config import ModelConfig
from lab.model.decoder import Decoder
from lab.train.data import Text, TextBatch, digest, endless, frequent_tokens, one_epoch
from lab.train.export import read_head, write_head
from lab.train.heads import Eagle1, Eagle3, Medusa
from lab.train.loss import Outcome, Teacher, Vocabulary, acceptance, eagle_outcome, mean_length, medusa_outcome
from lab.train.options import TrainOptions
from lab.train.target import FrozenTarget

log = logging.getLogger("lab")

CHECKPOINT = "checkpoint.pt"
MAY_CHANGE = ("steps", "every", "data", "lr", "unroll", "decay", "start")  # of the options, when a training goes on
WARM_UP = 0.05  # of the steps, until the learning rate is at its highest
LOWEST = 0.05  # of the highest learning rate, at the end
CLIP = 1.0  # norm of the gradient
SHOWN_EVERY_S = 20.0


class Training:
    """One head in training, kept in `folder`."""

    def __init__(
        self,
        model: Decoder,
        config: ModelConfig,
        texts: list[Text],
        options: TrainOptions,
        folder: Path,
        seed: int,
        *,
        compiles: bool = False,
    ) -> None:
        """Begin, or go on with what the folder holds. Raises UserError when that is another training.

        `compiles`: what the head and its loss do element by element is compiled, which pays after some dozens of steps.
        """
        self.options, self.config, self.folder, self.seed = options, config, folder, seed
        self._aux = _aux_layers(options, config)
        self._target = FrozenTarget(model, self._aux)
        texts = [replace(text, number=number) for number, text in enumerate(texts)]
        if options.keep_states:
            self._target.keep_states(folder, [len(text.ids) for text in texts])
        random.Random(f"validation {seed}").shuffle(texts)
        num_validation = min(options.validation, len(texts) // 10 + 1)
        self._validation, self._texts = texts[:num_validation], texts[num_validation:] or texts
        vocab = min(options.draft_vocab or config.vocab_size, config.vocab_size)
        ids_V = frequent_tokens(self._texts, config.vocab_size, vocab)
        self._vocabulary = Vocabulary.of(self._target, ids_V, config.vocab_size, compiles=compiles)
        torch.manual_seed(seed)
        device = model.embed.weight.device
        self.head = _head(options, config)
        self.head.start_from(model)
        if options.start is not None:
            read_head(Path(options.start), self.head)
        self.head.to(device)
        if compiles and not isinstance(self.head, Medusa):
            self.head.layer.compile_parts()
        self._dtype = model.embed.weight.dtype
        self._optimiser = torch.optim.AdamW(
            self.head.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.step = 0
        self.report: dict[str, Any] = {}
        self._identity = {"seed": seed, "texts": digest(texts), "target": repr(sorted(_target_facts(config).items()))}
        self._resume()

    @property
    def division(self) -> str:
        """How many texts are for what, in words."""
        return f"{len(self._texts)} texts to learn from, {len(self._validation)} to judge by"

    @property
    def coverage(self) -> float:
        """The part of the answers' tokens that the head can propose."""
        known = self._vocabulary.place_of >= 0
        ids = torch.tensor([token for text in self._texts for token in text.ids[text.num_prompt :]])
        return float(known.cpu()[ids].float().mean())

    def run(self) -> dict[str, Any]:
        """Train up to `options.steps`; returns the report that stands in train.json.

        Raises KeyboardInterrupt on Ctrl-C, after the running step, with what was learnt by then in the checkpoint.
        """
        batches = itertools.islice(endless(self._texts, self.options.batch_tokens, self.seed), self.step, None)
        shown_s = begin_s = time.monotonic()
        first = self.step
        with gentle_interrupt() as interrupt:
            while self.step < self.options.steps:
                loss = self._learn(next(batches))
                self.step += 1
                if interrupt.wanted:
                    self._keep(validate=False)
                    raise KeyboardInterrupt
                now = time.monotonic()
                if now - shown_s > SHOWN_EVERY_S or self.step == self.options.steps:
                    shown_s = now
                    pace = (now - begin_s) / (self.step - first)
                    left_s = pace * (self.options.steps - self.step)
                    log.info(
                        "step %d of %d: loss %.3f, %.1f s a step, %.0f s left",
                        self.step,
                        self.options.steps,
                        loss,
                        pace,
                        left_s,
                    )
                if self.step % self.options.every == 0 or self.step == self.options.steps:
                    self._keep(validate=True)
        if not self.report:
            self._keep(validate=True)
        return self.report

    def validate(self) -> list[float]:
        """The acceptance by draft position on the texts that were kept apart."""
        order = random.Random("validation")
        with torch.no_grad():
            outcomes = [self._outcome(batch) for batch in one_epoch(self._validation, self.options.batch_tokens, order)]
        return acceptance(outcomes)

    def _learn(self, batch: TextBatch) -> float:
        for group in self._optimiser.param_groups:
            group["lr"] = self.options.lr * _rate(self.step, self.options.steps)
        outcome = self._outcome(batch)
        self._optimiser.zero_grad(set_to_none=True)
        outcome.loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
        self._optimiser.step()
        return float(outcome.loss.detach())

    def _outcome(self, batch: TextBatch) -> Outcome:
        teacher = Teacher(self._target, batch, self._vocabulary)
        low = self._dtype in (torch.bfloat16, torch.float16)
        device = self._vocabulary.ids_V.device.type
        with torch.autocast(device, self._dtype) if low else contextlib.nullcontext():
            if isinstance(self.head, Medusa):
                return medusa_outcome(self.head, teacher, self.options.decay)
            return eagle_outcome(self.head, teacher, self.options.unroll, self.options.decay)

    def _keep(self, *, validate: bool) -> None:
        """Write the checkpoint, the head in its published format, and train.json."""
        state = {
            "head": self.head.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "step": self.step,
            "options": json.dumps(asdict(self.options)),
            "identity": json.dumps(self._identity),
        }
        torch.save(state, self.folder / f"{CHECKPOINT}.part")
        (self.folder / f"{CHECKPOINT}.part").replace(self.folder / CHECKPOINT)
        write_head(self.folder, self.head, self.config, self._vocabulary.ids_V, self._aux, self._dtype)
        if not validate:
            return
        rates = self.validate()
        self.report = {
            "kind": self.options.kind,
            "step": self.step,
            "texts": len(self._texts),
            "seed": self.seed,
            "draft_vocab": len(self._vocabulary.ids_V),
            "draft_vocab_coverage": round(self.coverage, 4),
            "acceptance_per_position": [round(rate, 4) for rate in rates],
            "tokens_per_step": round(mean_length(rates), 3),
            "options": asdict(self.options),
        }
        (self.folder / "train.json").write_text(json.dumps(self.report, indent=2) + "\n", encoding="utf-8")
        shown = " ".join(f"{rate:.2f}" for rate in rates)
        log.info("step %d: acceptance by position %s, %.2f tokens a step", self.step, shown, mean_length(rates))

    def _resume(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.exists():
            return
        state = torch.load(path, map_location=self._vocabulary.ids_V.device, weights_only=True)
        fixed = {name: value for name, value in asdict(self.options).items() if name not in MAY_CHANGE}
        now = json.loads(json.dumps({**fixed, **self._identity}))
        before = {**json.loads(state["options"]), **json.loads(state["identity"])}
        if other := sorted((name for name, value in now.items() if before.get(name) != value), key=lambda name: name != "kind"):
            name = other[0]
            raise UserError(
                f"{path} is of another training: {name} was {before.get(name)}, and is {now[name]}. "
                "Name another folder, or remove this one."
            )
        self.head.load_state_dict(state["head"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]
        log.info("going on after step %d", self.step)


def _head(options: TrainOptions, config: ModelConfig) -> Eagle1 | Eagle3 | Medusa:
    if options.kind == "medusa1":
        return Medusa(config, options.unroll)
    inner = options.intermediate_size or config.intermediate_size
    return Eagle3(config, inner) if options.kind == "eagle3" else Eagle1(config, inner)


def _aux_layers(options: TrainOptions, config: ModelConfig) -> tuple[int, ...]:
    """The published choice unless told otherwise; raises UserError for layers that the target lacks."""
    if options.kind != "eagle3":
        return ()
    count = config.num_layers
    chosen = options.aux_layers or (min(2, count), count // 2, max(count - 3, 0))
    if strange := [layer for layer in chosen if not 0 <= layer <= count]:
        raise UserError(f"train.aux_layers: {strange[0]} is no layer of the model, whose layers are 0 to {count}.")
    return tuple(chosen)


def _rate(step: int, steps: int) -> float:
    """Up in a line, down in a half cosine."""
    warm = min(1.0, (step + 1) / max(1.0, WARM_UP * steps))
    done = min(step / max(steps, 1), 1.0)
    return warm * (LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * done)))


def _target_facts(config: ModelConfig) -> dict[str, Any]:
    return {name: value for name, value in config.raw.items() if isinstance(value, int | float | str | bool)}
