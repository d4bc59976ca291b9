"""Behind `lab train-draft`: answers to learn from, the training, and the folder that both are kept in."""

import itertools
import json
import logging
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lab import memory
from lab.bench.arrivals import checked_items
from lab.bench.files import RunLog
from lab.bench.job import model_facts
from lab.bench.sender import plan
from lab.capabilities import Needs
from lab.compile.setup import settle_mode
from lab.engine.build import choose_device, choose_dtype
from lab.engine.generation import Generation
from lab.engine.resolution import resolve
from lab.engine.stack import build_stack
from lab.engine.tokenizer import encode, load_tokenizer
from lab.errors import UserError
from lab.interrupt import gentle_interrupt
from lab.model.config import read_config
from lab.model.load import load_model
from lab.model.source import resolve_model
from lab.registry import discover
from lab.settings import PluginChoice, Settings
from lab.train.data import Text, read_texts
from lab.train.loop import Training
from lab.train.options import TrainOptions

log = logging.getLogger("lab")

ANSWERS = "answers.jsonl"
ANSWERED_AT_ONCE = 128  # requests between two times that the answers are written


def train_draft(settings: Settings, options: TrainOptions, folder: Path) -> dict[str, Any]:
    """Train a head for the settings' model and write it into `folder`; goes on where an earlier call was stopped.

    Returns the report that train.json holds. Raises UserError for what the settings or the options get wrong.
    """
    discover()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}.") from None
    with RunLog(folder):
        return _train(settings, options, folder)


def _train(settings: Settings, options: TrainOptions, folder: Path) -> dict[str, Any]:
    path = Path(options.data).expanduser() if options.data is not None else folder / ANSWERS
    if options.data is None:
        answer(settings, path)
    device = choose_device(settings)
    torch.set_num_threads(settings.num_threads or len(os.sched_getaffinity(0)))
    source = resolve_model(settings.model.path)
    config = read_config(source)
    quant, moe = (resolve(kind, PluginChoice("none"), Needs()).make() for kind in ("quant", "moe"))
    model = load_model(
        source,
        config,
        dtype=choose_dtype(settings.model.dtype, config, device),
        device=device,
        load_format=settings.model.load_format,
        quant=quant,
        moe=moe,
        max_model_len=min(config.max_position_embeddings, options.max_len + options.unroll),
    )
    texts = _texts(path, settings, source, config.vocab_size, options)
    memory.keep_freed()
    compiles = settle_mode(settings.compile.mode, device) != "none"
    training = Training(model, config, texts, options, folder, settings.seed, compiles=compiles)
    log.info("training: %s; the head can propose %.1f%% of their tokens", training.division, 100 * training.coverage)
    return training.run()


def answer(settings: Settings, path: Path) -> None:
    """Write the model's own answers to the workload, as many as `path` does not hold yet, in the workload's order.

    Raises KeyboardInterrupt on Ctrl-C, after the running step, with the answers that are there written.
    """
    resolved = resolve("workload", settings.workload, Needs())
    workload = resolved.make(settings.seed)
    stack = build_stack(replace(settings, spec=PluginChoice("none")))
    with closing(stack.engine):
        items = checked_items(workload.items(model_facts(stack)), resolved.entry.name)
        done = len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
        planned = plan(items[done:], stack.frontend, stack.frontend.defaults)
        with gentle_interrupt() as interrupt:
            for first in range(0, len(planned), ANSWERED_AT_ONCE):
                part = planned[first : first + ANSWERED_AT_ONCE]
                for request in part:
                    if request.error is not None:
                        raise UserError(f"workload: request {done + request.number}: {request.error}")
                generations = [stack.outputs.submit(request.submission) for request in part]
                while not (interrupt.wanted or all(generation.finished for generation in generations)):
                    stack.outputs.process(stack.engine.step())
                ended = list(itertools.takewhile(lambda generation: generation.finished, generations))
                _append(path, ended)
                log.info("answered %d of %d requests", done + first + len(ended), len(items))
                if interrupt.wanted:
                    raise KeyboardInterrupt


def _append(path: Path, generations: list[Generation]) -> None:
    """Write answers. Raises UserError for one that a failed step ended."""
    if failed := next((g.error for g in generations if g.error is not None), None):
        raise UserError(f"answering: a step failed: {failed}")
    lines = [
        json.dumps({"prompt_token_ids": list(output.prompt_token_ids), "output_token_ids": list(sample.token_ids)})
        for output in (generation.output() for generation in generations)
        for sample in output.outputs
    ]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))


def _texts(path: Path, settings: Settings, source: Path, vocab_size: int, options: TrainOptions) -> list[Text]:
    tokenizer = load_tokenizer(Path(settings.model.tokenizer) if settings.model.tokenizer else source)

    def tokens(text: str) -> list[int]:
        if tokenizer is None:
            raise UserError(f"train.data: {path} holds text, and the model has no tokenizer. Give token ids.")
        return encode(tokenizer, text, add_special_tokens=True)

    return read_texts(path, tokens, vocab_size, options.max_len)
