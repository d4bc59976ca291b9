"""flex: the user's own score and mask functions, and how they are named. Without them the contract's checks judge it."""

import re

import pytest
import torch
from torch._dynamo.utils import counters

from lab import LLM, SamplingParams, registry
from lab.checks.attention_trial import Case, Trial, spec_of
from lab.errors import UserError
from tests import rigs

registry.discover()
FLEX = registry.get("attention", "flex")
CPU = torch.device("cpu")
MODS = """
import torch

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def alibi(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * (q_idx - kv_idx)


def far_less(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx - kv_idx < 8, score, score - 2.0)


def prefix_lm(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) | (kv_idx < 24)


def documents(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) & (q_idx // 10 == kv_idx // 10)


def ends_with_the_row(b, h, q_idx, kv_idx):
    return (b == 0) & (kv_idx >= 0)


def short(score, b, h):
    return score


TEN = 10
"""


@pytest.fixture(scope="module")
def mods(tmp_path_factory):
    path = tmp_path_factory.mktemp("mods") / "mods.py"
    path.write_text(MODS)
    return path


class Variant(Trial):
    """A trial whose definition is that of the functions in MODS, written out."""

    def __init__(self, case, bias=None, seen=None):
        super().__init__(case, CPU, seed=1)
        self.bias, self.seen = bias, seen

    def _scores(self, q_QNH, row, **changed):
        k_SNH = self.keys[row].double().repeat_interleave(self.case.num_heads // self.case.num_kv_heads, 1)
        scores = torch.einsum("qnh,snh->nqs", q_QNH.double(), k_SNH) * self.case.head_dim**-0.5
        if self.case.softcap is not None:
            scores = self.case.softcap * torch.tanh(scores / self.case.softcap)
        num_q, num_ctx = scores.shape[1:]
        q, k = torch.arange(num_ctx - num_q, num_ctx)[:, None], torch.arange(num_ctx)
        if self.bias is not None:
            scores = scores + self.bias(q, k)
        seen = self.seen(q, k) if self.seen is not None else k <= q
        if self.case.sliding_window is not None:
            seen &= k > q - self.case.sliding_window
        return scores.masked_fill(~seen, -torch.inf)


def alibi_bias(q, k):
    return -torch.tensor([0.5, 0.25, 0.125, 0.0625]).double()[:, None, None] * (q - k)


VARIANTS = [
    ("score_mod", "alibi", {"bias": alibi_bias}),
    ("score_mod", "far_less", {"bias": lambda q, k: -2.0 * (q - k >= 8)}),
    ("mask_mod", "prefix_lm", {"seen": lambda q, k: (k <= q) | (k < 24)}),
    ("mask_mod", "documents", {"seen": lambda q, k: (k <= q) & (q // 10 == k // 10)}),
    ("mask_mod", "ends_with_the_row", {"seen": lambda q, k: (k >= 0) & (q >= 0)}),
]
ROWS = ((0, 40), (30, 1), (25, 20), (99, 1), (16, 3), (57, 3), (0, 200))


def make(case, path, **functions):
    options = FLEX.make_options({k: f"{path}:{v}" if isinstance(v, str) else v for k, v in functions.items()})
    return FLEX.load()(options, spec_of(case, CPU))


@pytest.mark.parametrize("case", [Case(ROWS), Case(ROWS, sliding_window=9, softcap=3.0, num_padding=2)], ids=["", "window"])
@pytest.mark.parametrize(("option", "function", "definition"), VARIANTS, ids=[v[1] for v in VARIANTS])
def test_functions_see_positions_of_the_request(mods, option, function, definition, case):
    """Whatever was in the cache before the step; in rows that attend together, and with the layer's window and cap."""
    Variant(case, **definition).run(make(case, mods, **{option: function}), None)


def test_both_together(mods):
    definition = {"bias": alibi_bias, "seen": lambda q, k: (k <= q) & (q // 10 == k // 10)}
    Variant(Case(ROWS), **definition).run(make(Case(ROWS), mods, score_mod="alibi", mask_mod="documents"), None)


def test_uncompiled_it_traces_nothing(mods):
    """Tracing for each new shape would cost a hundred times the attention itself."""
    before = counters["stats"]["unique_graphs"]
    for rows in (ROWS, ROWS[1:], ROWS[2:]):
        Variant(Case(rows), bias=alibi_bias).run(make(Case(rows), mods, score_mod="alibi"), None)
    assert counters["stats"]["unique_graphs"] == before


def test_compiled_it_takes_other_shapes_without_compiling_again(mods):
    """Three tokens a row are padded to four; numbers of rows and contexts vary."""
    shape = {"sliding_window": 70, "softcap": 3.0}
    first, second = Case(((40, 3), (41, 3)), **shape), Case(((370, 3), (390, 3), (380, 3)), **shape)
    backend = make(first, mods, score_mod="alibi", mask_mod="documents", compiled=True)
    definition = {"bias": alibi_bias, "seen": lambda q, k: (k <= q) & (q // 10 == k // 10)}
    before = counters["stats"]["unique_graphs"]
    Variant(first, **definition).run(backend, None)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled == before + 1
    Variant(second, **definition).run(backend, None)
    assert counters["stats"]["unique_graphs"] == compiled


def test_a_run_with_alibi_does_not_depend_on_chunks(mods, tmp_path):
    torch.set_num_threads(1)
    folder = rigs.mix(tmp_path / "mix")
    prompts = [{"prompt_token_ids": [(7 * i + n) % 256 for i in range(n)]} for n in (5, 40, 70)]

    def generate(*overrides):
        base = ["compile.mode=none", "model.dtype=float32", "model.max_model_len=128", "cache.num_blocks=64", "num_threads=1"]
        with LLM(str(folder), attention="flex", overrides=[*base, *overrides]) as llm:
            outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
            return [out.outputs[0].token_ids for out in outs]

    biased = generate(f"attention.score_mod='{mods}:alibi'")
    assert biased == generate(f"attention.score_mod='{mods}:alibi'", "scheduler.max_num_batched_tokens=7")
    assert biased != generate()


def test_sinks_cannot_be_compiled_for_the_cpu():
    with pytest.raises(UserError, match="attention.compiled=true: attention sinks need a logsumexp"):
        FLEX.load()(FLEX.make_options({"compiled": True}), spec_of(Case((), sinks=True), CPU))


@pytest.mark.parametrize(
    ("option", "reference", "says"),
    [
        ("score_mod", "{path}", "attention.score_mod='.*mods.py': write FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION."),
        ("score_mod", "none.py:alibi", "attention.score_mod='none.py:alibi': there is no file .*none.py."),
        ("score_mod", "{path}:alibis", "has no function 'alibis'. Did you mean 'alibi'?\nIt has: alibi, documents, ends_with"),
        ("mask_mod", "{path}:TEN", "attention.mask_mod: .*mods.py has no function 'TEN'."),
        ("score_mod", "{path}:short", r"short of .* must take the arguments \(score, b, h, q_idx, kv_idx\): too many"),
        ("mask_mod", "{path}:alibi", r"alibi of .* must take the arguments \(b, h, q_idx, kv_idx\): missing a required"),
        ("score_mod", "no.such.module:alibi", "cannot be imported:\n(.|\n)*No module named 'no'"),
        ("score_mod", "{folder}/broken.py:alibi", "cannot be imported:\n(.|\n)*line 1(.|\n)*ZeroDivisionError"),
    ],
)
def test_a_wrong_reference_is_told(mods, option, reference, says):
    (mods.parent / "broken.py").write_text("half = 1 / 0\n")
    options = FLEX.make_options({option: reference.format(path=mods, folder=mods.parent)})
    with pytest.raises(UserError, match=says.replace("?", re.escape("?"))):
        FLEX.load()(options, spec_of(Case(()), CPU))
