"""Greedy outputs with trees of drafts are transformers' own, under every setting of the engine and with every backend."""

import numpy as np
import pytest
import torch

from lab import registry
from lab.api import Capabilities, Draft, Proposer, register
from lab.sample.tree import Tree
from tests import draft_heads, rigs
from tests.golden.oracle import greedy
from tests.golden.test_drafts import PROMPTS, SETTINGS
from tests.golden.test_tiny_models import NUM_TOKENS, generate

RIGHT: dict[tuple[int, ...], list[int]] = {}  # outputs by prompt
DEPTH, NODES = 4, 11


@pytest.fixture(scope="module", autouse=True)
def known():
    """A registered proposer of trees that knows RIGHT, and hides what is right among what is wrong, somewhere in the tree."""

    @register("spec", "known-tree")
    class KnownTree(Proposer):
        """Trees of random shape; half of the nodes that could be right are."""

        capabilities = Capabilities()
        num_drafts, tree_depth = NODES, DEPTH

        def propose(self, view):
            token_ids, parents = [], []
            for row, length, limit, depth in zip(view.rows_R, view.lengths_R, view.limits_R, view.depths_R, strict=True):
                text = tuple(view.tokens_RC[row, :length].tolist())
                ids, shape = self._tree(text, int(depth))
                token_ids.append(ids[:limit])
                parents.append(shape[:limit])
            return Draft(token_ids, parents=parents)

        def _tree(self, text, most_depth):
            prompt = next(p for p in sorted(RIGHT, key=len, reverse=True) if text[: len(p)] == p)
            coming = RIGHT[prompt][len(text) - len(prompt) :]
            rng, ids, parents = np.random.default_rng(len(text)), [], []
            while len(ids) < NODES and most_depth:
                shape = [*parents, int(rng.integers(-1, len(parents)))]
                depth = Tree.of(shape).depths[-1]
                if depth <= most_depth:
                    parents = shape
                    is_right = rng.random() < 0.6 and depth <= len(coming)
                    ids.append(coming[depth - 1] if is_right else int(rng.integers(256)))
            return ids, parents

    yield
    registry._entries.pop(("spec", "known-tree"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    folder = rigs.mix(tmp_path_factory.mktemp("mix") / "mix", seed=5)
    RIGHT.update({tuple(prompt): greedy(folder, prompt, NUM_TOKENS) for prompt in PROMPTS})
    return folder


def check(folder, *overrides, right=None, spec="known-tree", prompts=PROMPTS, attention="sdpa", times=1):
    found, engine, outs = generate(folder, *overrides, attention=attention, spec=spec, prompts=prompts, times=times)
    assert found == (right or [RIGHT[tuple(prompt)] for prompt in prompts])
    return engine, [out.outputs[0].timeline for out in outs]


def sums(timelines):
    """Whether any step's drafts branched, the drafts accepted, and the most of one step."""
    steps = [step for t in timelines for step in zip(t.draft_depths, t.draft_counts, t.accepted_counts, strict=True)]
    accepted = [count for _, _, count in steps]
    return any(depth < drafts for depth, drafts, _ in steps), sum(accepted), max(accepted)


@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_outputs(model, setting):
    overrides, arguments = SETTINGS[setting]
    engine, timelines = check(model, *overrides, **arguments)
    branched, accepted, most = sums(timelines)
    if setting == "budget 1":  # leaves no room for a draft
        assert not branched and not accepted
    else:
        assert branched and accepted > 50 and most > 2
    assert (engine.scheduler.num_preemptions > 0) == setting.startswith("preempted")


@pytest.mark.parametrize("attention", ["eager", "hybrid", "flash", "flex"])
def test_every_backend(model, attention):
    prompts = PROMPTS[:2] if attention == "flex" else PROMPTS
    _, timelines = check(model, "cache.block_size=8", attention=attention, prompts=prompts)
    assert sums(timelines)[2] > 2


@pytest.mark.parametrize(("attention", "dtype"), [("sdpa", "fp8"), ("flash", "int8")])
def test_a_quantized_cache_holds_the_accepted_path(model, attention, dtype):
    """What is moved is what was written, scales included: outputs are those of the same cache without drafts."""
    setting = f"cache.dtype={dtype}"
    plain, _, _ = generate(model, setting, attention=attention, prompts=PROMPTS)
    _, timelines = check(model, setting, attention=attention, right=plain)
    assert sums(timelines)[1] > 20


@pytest.mark.parametrize("architecture", ["gemma2", "mistral"])
def test_windows_and_the_groups_of_layers_that_have_them(model, tmp_path, architecture, monkeypatch):
    """Blocks behind the window are given back, and each group's path is moved in its own table."""
    folder = rigs.mix(tmp_path / "mix", architecture, sliding_window=12)
    prompts = PROMPTS[::3]
    monkeypatch.setitem(globals(), "RIGHT", {tuple(prompt): greedy(folder, prompt, NUM_TOKENS) for prompt in prompts})
    engine, timelines = check(folder, "cache.block_size=4", "cache.num_blocks=1200", attention="flash", prompts=prompts)
    assert engine.blocks.needs[-1].first_needed(20) > 0
    assert sums(timelines)[2] > 2


@pytest.mark.parametrize("length", ["acceptance", "batch"])
def test_a_length_that_changes_cuts_the_tree(model, length):
    check(model, f"draft_length={length}", times=2)


HEADS = {
    "eagle, dynamic": ["spec.tree=dynamic", "spec.depth=4", "spec.top_k=4", "spec.num_drafts=14"],
    "eagle, static": ["spec.tree=static", "spec.choices=[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[1,0,2]]"],
    "medusa, static": ["spec.tree=static", "spec.depth=3", "spec.num_drafts=20"],
}


@pytest.mark.parametrize("setting", ["budget 7, blocks of 1", "preempted by force, sync", "a warm prefix cache"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_that_draft_trees(model, tmp_path, name, setting):
    overrides, arguments = SETTINGS[setting]
    spec = name.split(",")[0]
    make = {"eagle": lambda at: draft_heads.random(at, model, "eagle3"), "medusa": lambda at: draft_heads.medusa(at, 64, 3)}
    options = [f"spec.head={make[spec](tmp_path / 'head')}", *HEADS[name]]
    arguments = {"prompts": PROMPTS[::2]} | arguments
    _, timelines = check(model, *overrides, *options, spec=spec, **arguments)
    branched, accepted, _ = sums(timelines)
    assert branched and accepted > 0
