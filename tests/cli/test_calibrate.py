"""lab calibrate: ranges over a workload, and the run that takes its scales from them."""

import json

import pytest
import torch

from lab import LLM, SamplingParams
from tests import rigs

SMALL = ["cache.num_blocks=40", "compile.mode=none", "num_threads=1", "model.max_model_len=128", "model.dtype=float32"]
PROMPTS = [[1, 2, 3], list(range(4, 40))]


@pytest.fixture
def work(tmp_path):
    """Overrides of a model with attention that matters, and a workload of two prompts without any output."""
    folder = rigs.mix(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in PROMPTS))
    return [f"model.path='{folder}'", f"workload.path='{prompts}'", "sampling.max_tokens=1", *SMALL]


def largest_written(folder):
    """The largest magnitudes in the full cache of each layer after the prompts: largest_2K."""
    with LLM(folder, attention="eager", overrides=[*SMALL, "cache.enable_prefix_caching=false"]) as llm:
        llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], SamplingParams(temperature=0, max_tokens=1))
        runner = llm.engine._executor._runner
        backend, blocks = runner.forward.backends[0], torch.arange(40)
        return [backend.export_blocks(kv, blocks).abs().amax((0, 1, 4)) for kv in runner.store.layers]


def test_ranges_are_the_largest_magnitudes_of_each_layer(lab, work, tmp_path):
    outcome = lab("calibrate", "--out=head.json", *work)
    assert outcome.code == 0 and outcome.out.endswith("head.json: ranges of 2 layers, over 39 tokens\n")
    outcome = lab("calibrate", "--out=tensor.json", "--per=tensor", "--json", *work, "cache.dtype=int8")
    assert json.loads(outcome.out.splitlines()[-1])["num_layers"] == 2
    head, tensor = (json.loads((tmp_path / "here" / name).read_text()) for name in ("head.json", "tensor.json"))
    for layer, wanted_2K in enumerate(largest_written(tmp_path / "model")):
        for half, name in enumerate(("keys", "values")):
            assert torch.allclose(torch.tensor(head[name][layer]), wanted_2K[half])
            assert tensor[name][layer] == [max(head[name][layer])]


def test_a_run_takes_its_scales_from_the_file(lab, work, tmp_path):
    lab("calibrate", "--out=ranges.json", *work)
    quiet = ["tracking.wandb.mode=disabled", "tracking.progress=off", "cache.dtype=int8", "cache.scales=ranges.json"]
    outcome = lab("run", "--json", *work, *quiet)
    assert outcome.code == 0, outcome.err
    record = json.loads(outcome.out)
    assert record["num_requests"] == 2 and record["num_failed"] == 0
    assert record["kv"]["bytes_per_token"] == 2 * 2 * 2 * 32  # layers, halves, heads, a padded head dim of bytes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "name the file to write: lab calibrate --out=FILE."),
        (["--out=no/such/folder.json"], "--out=no/such/folder.json: there is no folder no/such."),
        (["--out=x.json", "--per=tensr"], "no granularity named 'tensr'. Did you mean 'tensor'?"),
    ],
)
def test_mistakes(lab, flags, message):
    outcome = lab("calibrate", *flags)
    assert outcome.code == 2 and message in outcome.err


def test_a_request_that_the_model_cannot_take(lab, work):
    outcome = lab("calibrate", "--out=x.json", *work, "model.max_model_len=20")
    assert outcome.code == 2 and "workload: request 1: " in outcome.err
