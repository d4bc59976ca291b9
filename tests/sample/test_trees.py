"""Verification of trees: every node is judged by its own path, and siblings are tried exactly."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.sample.sampler import Sampler
from lab.sample.tree import MOST_NODES, Tree
from lab.sample.verify import follow
from lab.sampling_params import SamplingParams
from tests.sample.reference import chi_square_p
from tests.sample.rig import CPU, GREEDY, generate, make

NUM_DRAWS, BATCH = 6_000, 1000


def test_a_tree_knows_depths_and_paths():
    tree = Tree.of([-1, -1, 0, 2, 1, 2])
    assert tree.depths == (1, 1, 2, 3, 2, 3) and tree.depth == 3 and not tree.is_chain
    assert tree.ancestors == (0b1, 0b10, 0b101, 0b1101, 0b10010, 0b100101)
    assert tree.children(-1) == [0, 1] and tree.children(2) == [3, 5] and tree.children(5) == []
    assert tree.first(3) == Tree.of([-1, -1, 0]) and tree.first(9) is tree
    assert Tree.of([-1, 0, 1]).is_chain


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([0], "node 0 has the parent 0, which must be -1 or an earlier node"),
        ([-1, 2, -1], "node 1 has the parent 2"),
        ([-2], "node 0 has the parent -2"),
        ([-1] * (MOST_NODES + 1), "a tree of 64 nodes, and at most 63"),
    ],
)
def test_what_is_no_tree_is_refused(parents, message):
    with pytest.raises(ValueError, match=message):
        Tree.of(parents)


def test_follow_goes_to_the_child_that_is_the_target():
    tree = Tree.of([-1, -1, 0, 1, 3])
    ids = [5, 6, 7, 8, 9]
    assert follow([6, 0, 8, 0, 9, 4], ids, tree) == ([6, 8, 9, 4], [1, 3, 4])
    assert follow([5, 7, 8, 3, 9, 4], ids, tree) == ([5, 7, 3], [0, 2])
    assert follow([4, 7, 8, 3, 9, 4], ids, tree) == ([4], [])
    assert follow([5, 8, 8, 3, 9, 4], ids, tree) == ([5, 8], [0])


PARAMS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9},
    "filtered": {"temperature": 1.1, "top_k": 5, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.5, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 1.5},
    "bias and bans": {"temperature": 1.0, "logit_bias": {3: 2.0, 9: -3.0}, "bad_words_ids": [[4, 5], [7]]},
    "min_tokens": {"temperature": 1.0, "max_tokens": 40, "min_tokens": 25, "stop_token_ids": [1, 2, 3]},
    "allowed": {"temperature": 1.0, "allowed_token_ids": [1, 2, 3, 4, 5, 6, 8]},
}


@pytest.mark.parametrize("name", PARAMS)
def test_outputs_and_logprobs_are_those_of_plain_decoding(name):
    """One request, one token after another; then with trees that hold the right tokens among wrong ones, at random places."""
    table = 2 * torch.randn(12, 12, generator=torch.Generator().manual_seed(3))
    params = replace(SamplingParams(**PARAMS[name]), logprobs=2)
    tokens_plain, _ = generate(params, [7], lambda token: table[token], 40)
    sampler = Sampler(1, 12, CPU)
    plain = Sampler(1, 12, CPU)
    for each in (sampler, plain):
        each.add(0, params, 42, frozenset(), [7], 1)
    rng, tokens, accepted, depths = np.random.default_rng(1), [7], 0, []
    while len(tokens) <= 36:
        coming = tokens_plain[len(tokens) - 1 :]
        parents, ids = [], []
        for node in range(9):
            parents.append(int(rng.integers(-1, node)))
            depth = Tree.of(parents).depths[-1]
            ids.append(coming[depth - 1] if rng.random() < 0.5 and depth <= len(coming) else int(rng.integers(12)))
        tree = Tree.of(parents)
        logits_LV = torch.stack([table[token] for token in [tokens[-1], *ids]])
        out = sampler.run(logits_LV, [0], [len(ids)], [ids], trees=[tree])
        (new,), (path,) = out.token_ids, out.paths
        assert [ids[node] for node in path] == new[:-1] and len(out.logprobs[0]) == len(new)
        for token, entry in zip(new, out.logprobs[0], strict=True):
            one = plain.run(table[tokens[-1]][None].clone(), [0], [0], [[]])
            assert one.token_ids == [[token]] and one.logprobs == [[entry]]
            tokens.append(token)
        accepted += len(path)
        depths.append(tree.depth)
    assert tokens[1:] == tokens_plain[: len(tokens) - 1]
    assert accepted > 10 and max(depths) > 2


def test_chains_and_trees_share_a_step():
    table = torch.eye(8)[torch.arange(1, 9) % 8] * 9
    sampler = make([(GREEDY, [1], [])] * 3, 8)
    trees = [None, Tree.of([-1, -1, 1]), None]
    drafts = [[2, 9 % 8], [5, 2, 3], []]
    rows = [[1, 2, 1], [1, 5, 2, 3], [1]]
    logits_LV = torch.stack([table[token] for row in rows for token in row])
    out = sampler.run(logits_LV, [0, 1, 2], [2, 3, 0], drafts, trees=trees)
    assert out.token_ids == [[2, 3], [2, 3, 4], [2]]
    assert out.paths == [[0], [1, 2], []]
    again = make([(GREEDY, [1], [])] * 3, 8)
    assert again.run_greedy(logits_LV.argmax(-1), [0, 1, 2], [2, 3, 0], drafts, trees).token_ids == out.token_ids


def verify_many(target, tree, draw_drafts, params=None):
    """The tokens put out in each of NUM_DRAWS verifications. target: the probabilities after each token, wherever it stands."""
    rng = np.random.default_rng(5)
    vocab = len(target)
    sampler = make([(params or SamplingParams(), [0], []) for _ in range(BATCH)], vocab)
    found = []
    for _ in range(NUM_DRAWS // BATCH):
        drafts, probs = zip(*(draw_drafts(rng) for _ in range(BATCH)), strict=True)
        tokens_L = np.array([[0, *ids] for ids in drafts]).ravel()
        logits_LV = torch.tensor(target).log()[tokens_L]
        out = sampler.run(
            logits_LV,
            list(range(BATCH)),
            [len(tree.parents)] * BATCH,
            list(drafts),
            None if probs[0] is None else torch.tensor(np.array(probs)),
            [tree] * BATCH,
        )
        found += out.token_ids
    return found


TARGET = [[0.25, 0.4, 0.2, 0.15], [0.25, 0.25, 0.1, 0.4], [0.7, 0.1, 0.1, 0.1], [0.05, 0.15, 0.5, 0.3]]
PROPOSAL = np.array([0.5, 0.3, 0.1, 0.1], np.float32)


def independent(tree):
    """Siblings drawn from one distribution, with replacement."""

    def draw(rng):
        ids = rng.choice(4, len(tree.parents), p=PROPOSAL / PROPOSAL.sum()).tolist()
        return ids, np.tile(PROPOSAL, (len(ids), 1))

    return draw


def without_replacement(tree):
    """Siblings that differ: each drawn from what the earlier ones left."""

    def draw(rng):
        ids, probs = [0] * len(tree.parents), np.zeros((len(tree.parents), 4), np.float32)
        for node in range(-1, len(tree.parents)):
            left = PROPOSAL.astype(float)
            for child in tree.children(node):
                left /= left.sum()
                ids[child], probs[child] = int(rng.choice(4, p=left)), left
                left[ids[child]] = 0
        return ids, probs

    return draw


@pytest.mark.parametrize("draw_of", [independent, without_replacement])
@pytest.mark.parametrize("parents", [(-1, -1, -1, 0, 0, 1, 2), (-1, 0, 0, 0)], ids=str)
def test_drawn_siblings_leave_the_distribution_alone(parents, draw_of):
    """The first two tokens, against their exact joint probabilities."""
    tree = Tree.of(parents)
    found = verify_many(TARGET, tree, draw_of(tree))
    first = np.bincount([tokens[0] for tokens in found], minlength=4)
    assert chi_square_p(first.tolist(), TARGET[0]) > 1e-4
    pairs = np.zeros((4, 4))
    for tokens in found:
        if len(tokens) > 1:
            pairs[tokens[0], tokens[1]] += 1
    for token in range(4):  # given that a first draft was accepted the second follows its own distribution
        assert pairs[token].sum() > 40
        assert chi_square_p(pairs[token].tolist(), TARGET[token]) > 1e-4
    assert max(map(len, found)) == 1 + tree.depth


def test_more_siblings_are_accepted_more_often():
    rates = []
    for width in (1, 2, 3, 4):
        tree = Tree.of([-1] * width)
        found = verify_many(TARGET, tree, without_replacement(tree))
        rates.append(np.mean([len(tokens) - 1 for tokens in found]))
    assert abs(rates[0] - np.minimum(PROPOSAL, TARGET[0]).sum()) < 0.03
    assert rates == sorted(rates) and rates[-1] == 1.0


def test_one_hot_siblings_are_accepted_with_all_the_probability_that_they_have():
    """No tree of these tokens could be accepted more often: at each node all that the target gives its children."""
    tree, ids = Tree.of([-1, -1, 0, 0, 1]), [1, 3, 0, 3, 2]
    found = verify_many(TARGET, tree, lambda rng: (ids, None))
    first, second = TARGET[0][1] + TARGET[0][3], TARGET[0][1] * (TARGET[1][0] + TARGET[1][3]) + TARGET[0][3] * TARGET[3][2]
    accepted = np.bincount([len(tokens) - 1 for tokens in found], minlength=3)
    assert chi_square_p(accepted.tolist(), [1 - first, first - second, second]) > 1e-4
