"""A compiled draft head: it runs as one chain, and drafts what it drafts uncompiled."""

from lab import registry
from lab.compile.chain import Chain
from tests import draft_heads
from tests.compile.conftest import PROMPTS, generate

registry.discover()
Eagle = registry.get("spec", "eagle").load()


def test_it_drafts_what_it_drafts_uncompiled(open_llm, eager_tokens, folder, tmp_path, monkeypatch):
    head_folder = draft_heads.random(tmp_path / "head", folder, "eagle3", draft_vocab=100)
    drafts, chains = [], []
    propose, run = Eagle.propose, Chain.run

    def noted(proposer, view):
        draft = propose(proposer, view)
        drafts.append(draft.token_ids)
        return draft

    def counted(chain, *arguments):
        chains.append(chain)
        return run(chain, *arguments)

    monkeypatch.setattr(Eagle, "propose", noted)
    monkeypatch.setattr(Chain, "run", counted)
    settings = [f"spec.head={head_folder}", "spec.num_drafts=3", "draft_length=fixed"]
    with open_llm("attention=flash", "scheduler.async_scheduling=false", *settings, spec="eagle") as llm:
        proposer = llm.engine._executor._runner._drafting._proposer
        found = []
        for compiled in (proposer._head.compiled, None):
            proposer._head.compiled = compiled
            drafts.clear()
            chains.clear()
            llm.engine.reset_prefix_cache()
            tokens, steps = generate(llm)
            assert tokens == eager_tokens
            found.append((list(drafts), len(set(chains)), len(chains) - len(steps)))
    (with_chain, both, head_calls), (without, one, none) = found
    assert with_chain == without and sum(map(len, with_chain)) > len(PROMPTS)
    assert (both, one, none) == (2, 1, 0), "the model's chain, and the head's"
    assert head_calls > 2 * len(with_chain), "once to see a step, and for each draft but the first"
