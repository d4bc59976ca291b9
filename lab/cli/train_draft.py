"""`lab train-draft`: a draft head for a model, from the model's own answers or from texts."""

import json
from pathlib import Path

from lab import registry
from lab.cli.ahead import check_ahead
from lab.cli.arguments import Arguments
from lab.cli.folders import absent, made_folder, taken_back_if_refused
from lab.config import compose, take_options
from lab.errors import UserError
from lab.interrupt import import_interruptibly
from lab.train.options import TrainOptions


def train_draft(arguments: Arguments) -> int:
    """Train, write the head's folder, say what it came to."""
    registry.discover(arguments.plugins)
    if len(arguments.out) != 1:
        raise UserError("name the folder to write: lab train-draft --out=FOLDER.")
    options, overrides = take_options("train", TrainOptions, arguments.overrides)
    settings = compose(overrides, arguments.config_dirs)
    if options.data is None:
        check_ahead(settings)
    elif not Path(options.data).expanduser().is_file():
        raise UserError(f"train.data={options.data}: there is no such file.")
    made = absent(arguments.out[0])
    folder = made_folder(arguments.out[0])
    with taken_back_if_refused(folder, made):
        job = import_interruptibly("lab.train.job")  # brings torch, which an answer to a typo must not wait for
        report = job.train_draft(settings, options, folder)
    if arguments.json:
        print(json.dumps(report))
    else:
        rates = " ".join(f"{rate:.2f}" for rate in report["acceptance_per_position"])
        print(f"{folder}: {report['kind']} head, acceptance by position {rates}, {report['tokens_per_step']:.2f} tokens a step")
    return 0
