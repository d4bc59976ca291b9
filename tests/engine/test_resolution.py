"""Which plugin serves a component, and the record of the choice."""

import re

import pytest

from lab.capabilities import Capabilities, Needs
from lab.contracts.attention import Attention
from lab.engine.resolution import resolve, told
from lab.errors import UserError
from lab.settings import PluginChoice
from tests import plugin_files


@pytest.fixture
def known(own_registry, tmp_path):
    """Beside lab's own policies: one with options, one whose limits only its import would tell, one that is broken."""
    plugin_files.policy(tmp_path, "shortest")
    path = plugin_files.policy(tmp_path, "computed")
    text = path.read_text().replace("from lab.api", "import math\nfrom lab.api", 1)
    path.write_text(text.replace("weight: float = 1.0", "weight: float = math.pi"))
    plugin_files.broken_syntax(tmp_path, "policy", "crooked")
    own_registry.discover([tmp_path])
    return own_registry


def test_the_record_says_what_was_chosen_and_why_no_other(known):
    resolved = resolve("policy", PluginChoice("shortest", {"weight": 2}), Needs())
    assert resolved.make().options.weight == 2.0
    assert resolved.record["name"] == "shortest" and resolved.record["options"] == {"weight": 2}
    passed_over = resolved.record["passed_over"]
    assert passed_over["fcfs"] == ["usable; 'shortest' was asked for"]
    assert passed_over["computed"] == ["not chosen"] and known.get("policy", "computed").cls is None
    assert passed_over["crooked"] == ["its file is broken"]


def test_a_broken_one_that_was_asked_for_is_told(known):
    with pytest.raises(UserError, match="SyntaxError"):
        resolve("policy", PluginChoice("crooked"), Needs())


def test_attention_without_sinks_is_passed_over_or_refused(own_registry):
    own_registry.discover()

    @own_registry.register("attention", "plain-in-test")
    class Plain(Attention):
        """Would be chosen before any other."""

        capabilities = Capabilities(devices={"cpu"}, priority=1000)

    assert resolve("attention", PluginChoice(), Needs(device="cpu")).record["name"] == "plain-in-test"
    needs = Needs(device="cpu", dtype="float32", features=frozenset({"sinks"}))
    record = resolve("attention", PluginChoice(), needs).record
    assert record["name"] != "plain-in-test" and record["passed_over"]["plain-in-test"] == ["it has no sinks"]
    message = "attention plugin 'plain-in-test' cannot serve this run: it has no sinks.\nThese can: .*eager"
    with pytest.raises(UserError, match=message):
        resolve("attention", PluginChoice("plain-in-test"), needs)


def test_what_serves_a_run_is_told_in_a_line(own_registry):
    own_registry.discover()
    cpu = Needs(device="cpu", dtype="float32", kv_dtype="float32", head_dim=16, block_size=16)
    asked = {
        "spec": ("spec", PluginChoice("none"), Needs()),
        "moe": ("moe", PluginChoice("none"), cpu),
        "draft_length": ("draft_length", PluginChoice("batch"), Needs()),
        "attention": ("attention", PluginChoice("eager"), cpu),
        "attention.1": ("attention", PluginChoice("eager"), cpu),
    }

    def line(**others):
        return told({name: resolve(*of).record for name, of in {**asked, **others}.items()})

    assert line() == "attention=eager, spec=none"
    drafting = line(spec=("spec", PluginChoice("ngram"), Needs()))
    assert drafting == "attention=eager, spec=ngram, draft_length=batch"
    chosen = line(attention=("attention", PluginChoice("auto"), cpu))
    assert re.match(r"attention=\w+ \(auto: of \d+ usable ones the highest priority\), spec=none, attention\.1=eager", chosen)
    parts = line(attention=("attention", PluginChoice("hybrid", {"prefill": "sdpa", "decode": "eager"}), cpu))
    assert parts.startswith("attention=hybrid (prefill sdpa, decode eager), ")
