"""The verbs of the command line: what each does, its flags, and the function that does it."""

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """A flag and the field of Arguments that it sets; with `value` it takes one, and may be repeated."""

    names: tuple[str, ...]
    target: str
    doc: str
    value: str = ""


COMMON_FLAGS = (
    Flag(("-h", "--help"), "wants_help", "show this text"),
    Flag(("--plugins",), "plugins", "a folder with plugins of your own (repeatable; also LAB_PLUGIN_PATH)", "DIR"),
    Flag(("--json",), "json", "print the result as one line of JSON"),
)
CONFIG_DIR = Flag(("--config-dir",), "config_dirs", "a folder with more configuration groups (repeatable)", "DIR")


@dataclass(frozen=True)
class Verb:
    """One verb. `target` is imported only when the verb is used, and `listing`, which makes a part of its help, for that."""

    name: str
    summary: str
    target: str
    usage: str
    text: str
    flags: tuple[Flag, ...] = ()
    listing: str = ""

    def all_flags(self) -> tuple[Flag, ...]:
        return (*COMMON_FLAGS, *self.flags)

    def help_text(self) -> str:
        rows = [(", ".join(f.names) + (f"={f.value}" if f.value else ""), f.doc) for f in self.all_flags()]
        width = max(len(name) for name, _ in rows)
        flags = "\n".join(f"  {name:<{width}}  {doc}" for name, doc in rows)
        parts = [self.summary, f"Usage: lab {self.usage}", self.text.strip(), f"Flags:\n{flags}"]
        if self.listing:
            module, _, function = self.listing.partition(":")
            parts.append(getattr(importlib.import_module(module), function)())
        return "\n\n".join(parts)


RUN_TEXT = """
Loads a model, runs a workload on it and writes a run folder (config.yaml, resolved.json, metrics.json, requests.jsonl,
steps.jsonl), then prints a table and the folder's path.

Overrides are NAME=VALUE with the names that stand at the end of this text:
  lab run cache.block_size=32 sampling.max_tokens=64
  lab run +attention=sdpa                    a plugin; attention=sdpa and ++attention=sdpa mean the same
  lab run +spec=ngram spec.num_drafts=4      an option of a plugin; `lab plugins spec` lists them
  lab run +experiment=NAME                   a study of conf/experiment
  lab run model=NAME                         a file of conf/model; model.path=... takes a folder, .gguf file or hub id

Sweeps: with -m every comma makes another point, and all combinations are run, each in its own process:
  lab run -m +attention=eager,sdpa cache.block_size=8,16
  lab run -m 'seed=range(0,5)' '+workload=glob(*)'
All points are checked before the first one starts, and none is run while one of them names what is not there. A point that
fails later is a row of the table with its reason; its folder holds the log. The sweep's folder gets sweep.csv, sweep.json
and a comparison with plots, report.html and report.md. Exit code: 0 when every point is ok, 2 when every point failed by a
mistake the user can mend, else 1.

Ctrl-C ends a run after the running step, and what is there is written; a second one does not wait. A run that is refused leaves
no folder.

Values are read by Hydra's grammar, so what it must not read as a list needs quotes of its own inside the shell's:
  sampling.stop='"a,b"'         one text with a comma           sampling.stop='[a,b]'   a list of two texts
  sampling.stop='"a|b c"'       any other special character     sampling.stop=a\\,b      a comma without quotes
  sampling.stop=$'"\\n"'         a newline: the shell must make it (inside plain quotes \\n stays backslash and n)

Where it goes: hydra.run.dir=FOLDER for a run (a folder that holds a run already is refused), hydra.sweep.dir=FOLDER for
a sweep. By default outputs/DATE/TIME_OVERRIDES and multirun/DATE/TIME_OVERRIDES; a counter is added to a name in use.
"""

VERBS = {
    verb.name: verb
    for verb in (
        Verb(
            "run",
            "Run an experiment, or a sweep of them.",
            "lab.cli.run:run",
            "run [-m] [flags] [overrides]",
            RUN_TEXT,
            (
                Flag(("-m", "--multirun"), "multirun", "a sweep: run every combination of the values separated by commas"),
                Flag(("--fail-fast",), "fail_fast", "end a sweep at the first point that fails"),
                Flag(("--print-config",), "print_config", "print the settings that the overrides come to, and do not run"),
                CONFIG_DIR,
            ),
            "lab.cli.reference:settings",
        ),
        Verb(
            "plugins",
            "List the plugins, their options and what they can do.",
            "lab.cli.plugins:plugins",
            "plugins [KIND[.NAME]] [flags]",
            """
Without an argument every plugin in a line; with a kind those of that kind with their options; with KIND.NAME all of one.
A plugin that cannot be used on this machine is listed with the reason, a broken one with its error.

KIND is one of attention, spec, draft_length, quant, moe, policy, workload, sink.
""",
        ),
        Verb(
            "check",
            "Judge a plugin by the contract of its kind.",
            "lab.cli.check:check",
            "check KIND=NAME [KIND.OPTION=VALUE ...] [flags]",
            """
Runs every contract test of the kind on that plugin, one line each, and ends with a verdict:
  lab check attention=mine --plugins=my_plugins
KIND is one of attention, spec, draft_length, quant, moe, policy, workload, sink; `lab plugins KIND.NAME` lists the options.
+KIND=NAME, KIND.NAME and scheduler.policy=NAME are understood as well. A check of something that the plugin does not
declare is not made, and says `not declared`.

Exit code: 0 when the plugin keeps its contract, 1 when a check failed, 2 when there is no such plugin or option.
""",
        ),
        Verb(
            "doctor",
            "Say what this machine has, and what therefore will not run.",
            "lab.cli.doctor:doctor",
            "doctor [flags]",
            """
Devices, cores, memory (limits of the container included), Python and packages, the C++ compiler, caches and their sizes,
the mode that W&B would use, and every plugin that cannot be used here with the reason. Nothing is downloaded or asked.
""",
        ),
        Verb(
            "roofline",
            "Print the floors of a model on this machine's device.",
            "lab.cli.roofline:roofline",
            "roofline [flags] [overrides]",
            """
What no implementation can beat: bytes of weights and of KV cache per token, FLOPs per token, the time of a decode step and
tokens per second at batch 1, the ridge (FLOPs per byte where arithmetic becomes the limit), B_sat (the batch from which it
does) and how many sequences fit in the memory. The device's bandwidth and peak are measured once and kept in the cache.
Only config.json of the model is read: model.path may be a folder without weights. The settings are those of `lab run`, see its
help; those that matter are model.path (or model=NAME), model.dtype, model.max_model_len, device, num_threads, cache.dtype,
cache.memory_bytes and cache.memory_utilization.
""",
            (CONFIG_DIR, Flag(("--measure",), "measure", "measure the device again; the higher of both results is kept")),
        ),
        Verb(
            "calibrate",
            "Write the ranges of keys and values that a quantized KV cache may take its scales from.",
            "lab.cli.calibrate:calibrate",
            "calibrate --out=FILE [flags] [overrides]",
            """
Runs a workload and keeps the largest magnitudes that each layer's keys and values reach. The file serves both quantized dtypes:
  lab calibrate --out=ranges.json workload.path=prompts.jsonl
  lab run cache.dtype=int8 cache.scales=ranges.json
Whatever lies beyond a range is clipped, so the workload should be like what will be served. The settings are those of
`lab run`, see its help.
""",
            (
                CONFIG_DIR,
                Flag(("--out",), "out", "the file to write", "FILE"),
                Flag(("--per",), "per", "head (the default) | tensor: what has a range of its own in each layer", "WHAT"),
            ),
        ),
        Verb(
            "report",
            "Compare runs and sweeps that are done, on one page.",
            "lab.cli.report:report",
            "report FOLDER... [flags]",
            """
Writes report.html, which needs no network, and report.md, and prints the latter: what was varied, output tokens per second,
TTFT, ITL and TPOT, decode step over floor, and whether all runs gave the same tokens; with plots on the page.
  lab report multirun/2026-01-31/12-00-00_attention-eager-sdpa      a sweep; `lab run -m` has done it already
  lab report outputs/*/*                                           runs, by the settings in which they differ
A single folder gets its report itself; several get a folder `report`, or that of --out.
""",
            (Flag(("--out",), "out", "the folder to write into", "FOLDER"),),
        ),
        Verb(
            "train-draft",
            "Train an EAGLE or Medusa head for a model, to draft tokens with.",
            "lab.cli.train_draft:train_draft",
            "train-draft --out=FOLDER [flags] [train.NAME=VALUE ...] [overrides]",
            """
Lets the model answer the prompts of a workload, keeps the answers in the folder, and trains the head on them, for as long as
the target's hidden states are there: they are made batch by batch and not stored.
  lab train-draft --out=head workload.path=prompts.jsonl train.draft_vocab=8192 train.steps=2000
  lab run +spec=eagle spec.head=head
With train.data=FILE it learns from texts instead: JSON lines of {"text": ...}, or of answers that were kept before.
The head is written in the published format of its kind (train.kind=eagle3 | eagle1 | medusa1), with train.json beside it: its
acceptance by draft position on texts that it did not see. Stopped (Ctrl-C ends it after the running step) and called again, it
goes on where it was. Beside the options below it takes the settings of `lab run`, see its help.
""",
            (CONFIG_DIR, Flag(("--out",), "out", "the folder to write", "FOLDER")),
            "lab.cli.reference:train_options",
        ),
        Verb("version", "", "lab.cli.version:version", "--version", "Print the version."),
    )
}


def overview() -> str:
    """The text of `lab --help`."""
    rows = [(v.name, v.summary) for v in VERBS.values() if v.summary]
    width = max(len(name) for name, _ in rows)
    verbs = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in rows)
    return (
        "lab: a laboratory bench for LLM inference.\n\n"
        "Usage: lab VERB [flags] [overrides]      (or python -m lab VERB ...)\n\n"
        f"{verbs}\n\n"
        "`lab VERB --help` says more; `lab run --help` lists every setting.\n\n"
        "  lab run                                          the default model on the default workload\n"
        "  lab run +attention=sdpa cache.block_size=32      change a plugin and a setting\n"
        "  lab run -m +attention=eager,sdpa                 compare: every combination in its own process"
    )
