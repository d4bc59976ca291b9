"""Proposers of trees: their shapes and drafts, what they refuse, and the distribution of what is put out with them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lab import LLM, SamplingParams, registry
from lab.api import ProposeView
from lab.config import compose
from lab.engine.drafts import check_trees_fit
from lab.errors import UserError
from lab.settings import DebugSettings, Settings
from plugins.spec_decode._siblings import Siblings
from plugins.spec_decode._tree import RANK_SHARES, StaticTree, checked_choices, pruned_product
from tests import draft_heads, rigs
from tests.spec.test_eagle import BASE, Oracle, generate

registry.discover()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def make(name, **options):
    entry = registry.get("spec", name)
    return entry.load()(entry.make_options(options))


class TestShapes:
    def test_the_pruned_product_has_the_best_paths(self):
        paths = pruned_product(12, 3)
        assert len(paths) == 12 and paths[:3] == [(0,), (0, 0), (0, 0, 0)] and max(map(len, paths)) == 3
        worth = [float(np.prod([RANK_SHARES[rank] for rank in path])) for path in paths]
        assert worth == sorted(worth, reverse=True)
        left_out = [(*path, rank) for path in [(), *paths] if len(path) < 3 for rank in range(10) if (*path, rank) not in paths]
        assert max(np.prod([RANK_SHARES[rank] for rank in path]) for path in left_out) <= worth[-1]

    def test_the_first_so_many_nodes_are_a_tree_and_siblings_stand_in_order(self):
        tree = StaticTree(checked_choices([[2, 0], [1], [2], [0], [0, 3], [0, 1], [0, 1, 15]]))
        assert all(parent < place for place, parent in enumerate(tree.parents))
        assert tree.depth == 3 and tree.num_entries == 3
        assert [tree.nodes[i].rank for i in tree.children(-1)] == [0, 1, 2]
        places = tree.rows([7, 4, 7], [3, 3, 1])
        assert [len(its) for its in places] == [7, 4, 3] and all(tree.nodes[i].depth == 1 for i in places[2])


REFUSED = [
    (
        "eagle",
        {"tree": "static", "choices": [[0], [0, 0], [0]]},
        r"choices\[2\]=\[0\]: the path is there already, as spec.choices\[0\]",
    ),
    ("eagle", {"tree": "static", "choices": [[0], [1, 0]]}, r"choices\[1\]=\[1, 0\]: its parent \[1\] is not among"),
    ("medusa", {"tree": "static", "choices": [[0], []]}, r"choices\[1\]=\[\]: a path is one rank or more"),
    ("medusa", {"tree": "static", "choices": [[0], [-1]]}, r"choices\[1\]=\[-1\]: a path is one rank or more"),
    ("eagle", {"tree": "static", "choices": [[i] for i in range(64)]}, "has 64 nodes: a tree has 1 to 63"),
    ("eagle", {"tree": "static", "choices": []}, "has 0 nodes: a tree has 1 to 63"),
    ("eagle", {"tree": "static", "choices": [[0], [1]], "num_drafts": 3}, "num_drafts=3, and spec.choices has 2 nodes"),
    ("eagle", {"choices": [[0]]}, "spec.tree is auto. Set spec.tree=static"),
    ("medusa", {"choices": [[0]]}, "spec.tree is none. Set spec.tree=static"),
    ("eagle", {"depth": 5}, "spec.depth=5 is of a tree, and spec.tree is auto. Set spec.tree, or leave it out"),
    ("medusa", {"depth": 2}, "spec.depth=2 is of a tree, and spec.tree is none"),
    ("eagle", {"tree": "none", "top_k": 4}, "spec.top_k=4 is of a tree, and spec.tree is none. Set spec.tree=dynamic"),
    ("eagle", {"num_drafts": 3, "depth": 2}, "spec.depth=2 is of a tree, and spec.tree is auto"),
    ("eagle", {"tree": "static", "top_k": 4}, "spec.top_k=4 is of a tree, and spec.tree is static"),
    ("eagle", {"tree": "static", "choices": [[0], [0, 0]], "depth": 3}, "spec.depth=3, and spec.choices is 2 deep"),
    ("eagle", {"tree": "dynamic", "choices": [[0]]}, "spec.tree is dynamic. Set spec.tree=static"),
    ("eagle", {"tree": "dynamic", "num_drafts": 64}, "spec.num_drafts must be a whole number from 1 to 63 for a tree, got 64"),
    ("eagle", {"tree": "dynamic", "num_drafts": 0}, "spec.num_drafts must be a whole number from 1 to 63 for a tree, got 0"),
    ("eagle", {"tree": "static", "num_drafts": 0}, "spec.num_drafts must be a whole number from 1 to 63 for a tree, got 0"),
    ("eagle", {"tree": "dynamic", "depth": 0}, "spec.depth must be a whole number from 1 to 63 for a tree, got 0"),
    ("eagle", {"tree": "dynamic", "top_k": 0}, "spec.top_k must be a whole number from 1 to 63 for a tree, got 0"),
    ("eagle", {"tree": "dynamic", "depth": 9, "top_k": 8}, r"run on 64 nodes, \(depth - 1\) \* top_k, and at most 63"),
    ("eagle", {"tree": "dynamic", "depth": 2, "top_k": 2, "num_drafts": 7}, "num_drafts=7: a tree of .* looks at 6 nodes"),
    (
        "eagle",
        {"tree": "dynamik"},
        "spec.tree must be one of auto, none, dynamic, static; got 'dynamik'. Did you mean 'dynamic'",
    ),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED, ids=[message[:30] for _, _, message in REFUSED])
def test_what_is_no_tree_is_refused_with_the_numbers(name, options, message):
    with pytest.raises(UserError, match=message):
        make(name, **options)


def test_what_trees_do_not_go_together_with_is_refused(tmp_path):
    target = rigs.mix(tmp_path / "mix")
    head = draft_heads.random(tmp_path / "head", target, "eagle3")
    medusa = draft_heads.medusa(tmp_path / "medusa", 64, 2)

    def refused(message, *overrides, spec="eagle", folder=target, head=head):
        with pytest.raises(UserError, match=message):
            LLM(str(folder), overrides=[*BASE, f"+spec={spec}", f"spec.head={head}", "cache.num_blocks=60", *overrides])

    exact = Settings(debug=DebugSettings(batch_invariant=True))  # eagle and medusa are refused by themselves then
    with pytest.raises(UserError, match="'own' proposes trees, .* as debug.batch_invariant=true asks"):
        check_trees_fit(exact, [], SimpleNamespace(name="own", tree_depth=2, tree_optional=False))
    mask = tmp_path / "mask.py"
    mask.write_text("def causal(b, h, q, k):\n    return k <= q\n")
    flex = ["+attention=flex", f"attention.mask_mod={mask}:causal"]
    refused("attention plugin 'flex' cannot serve this run: it has no tree_verify", "spec.tree=dynamic", *flex)
    deep = ["spec.tree=static", "spec.depth=3"]
    refused(f"a tree of depth 3 was asked for: {medusa} has 2 heads", *deep, spec="medusa", head=medusa)
    few = draft_heads.random(tmp_path / "few", target, "eagle3", draft_vocab=6)
    refused("a token of rank 6, and the head can propose 6 tokens", "spec.tree=static", "spec.choices=[[0],[6]]", head=few)
    windows = rigs.mix(tmp_path / "windows", "mistral", sliding_window=3)
    message = "trees of depth 3, and a layer of this model sees a window of 3 tokens"
    refused(message, *deep, spec="medusa", folder=windows, head=draft_heads.medusa(tmp_path / "three", 64, 3))


def test_without_a_word_of_the_shape_a_tree_is_drafted_where_it_can_be_verified(tmp_path, caplog):
    target = rigs.mix(tmp_path / "mix")
    windows = rigs.mix(tmp_path / "windows", "mistral", sliding_window=2)
    mask = tmp_path / "mask.py"
    mask.write_text("def causal(b, h, q, k):\n    return k <= q\n")
    caplog.set_level("INFO", logger="lab")

    def shape(*overrides, folder=target, **options):
        caplog.clear()
        head = draft_heads.random(tmp_path / "head", folder, "eagle3")
        given = [*BASE, f"spec.head={head}", "cache.num_blocks=60", *overrides]
        with LLM(str(folder), spec="eagle", overrides=given, **options) as llm:
            proposer = llm.engine._executor._runner._drafting._proposer
            generate(llm, [[3, 1, 4, 1, 5]], max_tokens=6)
        said = [text for text in caplog.messages if "drafts are chains" in text]
        return proposer.num_drafts, proposer.tree_depth, said

    assert shape() == (12, 2, [])
    assert shape("spec.num_drafts=3") == (3, 0, [])
    assert shape("spec.tree=none") == (4, 0, [])
    said = "spec.tree=auto: drafts are chains, not trees: "
    flex = shape(f"attention.mask_mod={mask}:causal", attention="flex")
    assert flex[:2] == (4, 0) and flex[2][0].startswith(f"{said}attention plugin 'flex' cannot serve this run: it has no tree")
    assert shape("debug.batch_invariant=true", "spec.draw=false", attention="flash") == (
        4,
        0,
        [f"{said}debug.batch_invariant=true"],
    )
    assert shape("cache.free_behind_window=false", folder=windows) == (
        4,
        0,
        [f"{said}a layer of this model sees a window of 2 tokens"],
    )


def test_the_settings_reach_the_plugin():
    settings = compose(["+spec=eagle", "spec.tree=static", "spec.choices=[[0],[0,1]]"])
    proposer = make("eagle", **settings.spec.options)
    assert (proposer.num_drafts, proposer.tree_depth, proposer.num_scratch) == (2, 2, 1)


def test_siblings_differ_at_any_temperature_and_each_has_its_own_distribution():
    """At a low one nothing of the distribution is left for the second sibling."""
    tree = StaticTree(checked_choices([[0], [1], [2], [0, 0]]))
    logits_RV = torch.tensor([[9.0, 1.0, 0.0, -4.0, 2.0]]).expand(3, -1)
    temperatures_R = np.array([0.0, 1e-3, 1.0])
    uniforms_RDS = np.random.default_rng(0).random((3, 2, 4))
    numbers = [np.arange(3), np.full(3, 8), np.full(3, 4), temperatures_R]
    view = ProposeView(None, *numbers, depths_R=np.full(3, 2), uniforms_RDS=uniforms_RDS)
    draft_ids = torch.tensor([3, 5, 6, 8, 9])
    siblings = Siblings(tree, view, 12, torch.device("cpu"), True, draft_ids)
    for parent in (-1, 0):
        siblings.choose(tree.children(parent), logits_RV)
    draft = siblings.draft()
    assert draft.token_ids[0] == [3, 3, 9, 5] and draft.parents == [tree.parents] * 3
    assert [node.rank for node in tree.nodes] == [0, 0, 1, 2]
    assert draft.token_ids[1][:2] == [3, 3]
    for row in range(3):
        first, _, second, third = draft.token_ids[row]
        assert len({first, second, third}) == 3
        for place, token in enumerate(draft.token_ids[row]):
            probs_V = draft.probs_RSV[row, place]
            assert (
                probs_V[token] > 0
                and abs(float(probs_V.sum()) - 1) < 1e-5
                and set(probs_V.nonzero()[:, 0].tolist()) <= {3, 5, 6, 8, 9}
            )
    assert draft.probs_RSV[2, 2, draft.token_ids[2][0]] == 0
    assert draft.probs_RSV[1, 2].tolist() == [0.25 if i in (5, 6, 8, 9) else 0 for i in range(12)]


@pytest.mark.parametrize("kind", draft_heads.KINDS)
def test_each_path_of_a_dynamic_tree_is_what_the_head_says_of_it(tmp_path, kind):
    """Along the likeliest path each node is what the head, run over the whole text at once, would have drafted in a chain."""
    target = rigs.mix(tmp_path / "mix", num_hidden_layers=4)
    head = draft_heads.random(tmp_path / "head", target, kind)
    options = [
        f"spec.head={head}",
        f"spec.format={kind}",
        "spec.tree=dynamic",
        "spec.depth=3",
        "spec.top_k=3",
        "spec.num_drafts=9",
    ]
    settings = ["cache.num_blocks=60", "cache.block_size=4", "scheduler.async_scheduling=false"]
    with LLM(str(target), spec="eagle", attention="eager", overrides=[*BASE, *options, *settings]) as llm:
        proposer = llm.engine._executor._runner._drafting._proposer
        seen, ordinary = [], proposer.propose

        def propose(view):
            draft = ordinary(view)
            for row, length, ids, parents in zip(view.rows_R, view.lengths_R, draft.token_ids, draft.parents, strict=True):
                seen.append((view.tokens_RC[row, :length].tolist(), ids, parents))
            return draft

        proposer.propose = propose
        generate(llm, [[3, 1, 4, 1, 5], list(range(20))], max_tokens=14)
        oracle = Oracle(target, head, kind, llm)
        some = [each for each in seen if each[1]][::2]
        assert all(_likeliest_chain(oracle, *each) for each in some) and len(some) > 8
        assert len({tuple(parents) for _, _, parents in some}) > 4, "shapes go by confidence"


def _likeliest_chain(oracle, text, ids, parents):
    """Whether the first node after each node of that path is the head's next draft, as far as the tree goes."""
    node = -1
    for token in oracle.drafts(text, 3):
        children = [i for i, parent in enumerate(parents) if parent == node]
        if not children:
            return node >= 0
        if ids[children[0]] != token:
            return False
        node = children[0]
    return True


def test_a_seed_gives_the_same_tokens_alone_and_beside_others(tmp_path):
    target = rigs.mix(tmp_path / "mix")
    head = draft_heads.random(tmp_path / "head", target, "eagle3")
    options = [f"spec.head={head}", "spec.tree=static", "spec.num_drafts=10", "cache.num_blocks=100"]
    prompts = [[3, 1, 4, 1, 5], list(range(30)), [9, 9]]
    found = []
    with LLM(str(target), spec="eagle", overrides=[*BASE, *options]) as llm:
        for some in (prompts, prompts[:1]):
            outs = llm.generate([{"prompt_token_ids": p} for p in some], SamplingParams(seed=5, max_tokens=20, ignore_eos=True))
            found.append(outs[0].outputs[0].token_ids)
    assert found[0] == found[1]
