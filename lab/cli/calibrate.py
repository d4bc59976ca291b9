"""`lab calibrate`: the ranges of keys and values over a workload, for the fixed scales of a quantized KV cache."""

import json
from pathlib import Path

from lab import registry
from lab.cli.ahead import check_ahead
from lab.cli.arguments import Arguments
from lab.config import compose
from lab.errors import UserError, unknown
from lab.interrupt import import_interruptibly

GRANULARITIES = ("head", "tensor")


def calibrate(arguments: Arguments) -> int:
    """Run the workload, write the file, say what is in it."""
    registry.discover(arguments.plugins)
    if len(arguments.out) != 1:
        raise UserError("name the file to write: lab calibrate --out=FILE.")
    per = arguments.per[-1] if arguments.per else "head"
    if per not in GRANULARITIES:
        raise unknown("granularity", per, GRANULARITIES)
    path = Path(arguments.out[0]).expanduser()
    if not path.parent.is_dir():
        raise UserError(f"--out={path}: there is no folder {path.parent}.")
    settings = compose(arguments.overrides, arguments.config_dirs)
    check_ahead(settings)
    job = import_interruptibly("lab.bench.calibrate")  # brings torch, which an answer to a typo must not wait for
    record = job.calibrate(settings, path, per_head=per == "head")
    if arguments.json:
        print(json.dumps(record))
    else:
        print(f"{path}: ranges of {record['num_layers']} layers, over {record['num_tokens']:,} tokens")
    return 0
