"""The mtp proposer: its module against the formulas in plain torch, whatever the engine does; what it refuses."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from lab import LLM, registry
from lab.errors import UserError
from tests import draft_heads, rigs
from tests.golden.oracle import hf_model
from tests.spec.whole_text import BASE, SETTINGS, generate, texts_and_drafts

registry.discover()
Mtp = registry.get("spec", "mtp").load()
KINDS = {"mimo": "qwen2", "deepseek": "llama"}
NUM_DRAFTS = 3


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    """(format, the model alone, the model with its module)."""
    folder = tmp_path_factory.mktemp(request.param)
    plain = rigs.mix(folder / "plain", KINDS[request.param])
    return request.param, plain, draft_heads.mtp(folder / "with", plain, request.param)


def open_llm(folder, *overrides, spec="mtp"):
    options = [f"spec.num_drafts={NUM_DRAFTS}"] if spec else []
    return LLM(str(folder), spec=spec, attention="eager", overrides=[*BASE, "cache.num_blocks=200", *options, *overrides])


class Reference:
    """What the module should propose after a text: the formulas, over the whole text at once, in plain torch."""

    def __init__(self, kind, plain, folder):
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        at = "model.mtp_layers.0." if kind == "mimo" else f"model.layers.{config['num_hidden_layers']}."
        self.w = {name.removeprefix(at): tensor for name, tensor in weights.items() if name.startswith(at)}
        self.embedding, self.head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        self.is_mimo = kind == "mimo"
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.eps, self.theta = config["rms_norm_eps"], config["rope_theta"]
        self.model = hf_model(plain)

    @torch.inference_mode()
    def drafts(self, text, count):
        states_JD = self.model.model(torch.tensor([text])).last_hidden_state[0, :-1]
        ids, found = text[1:], []
        for _ in range(count):
            out_D = self.module(states_JD, self.embedding[torch.tensor(ids)])[-1]
            found.append(int((self.head @ out_D).argmax()))
            states_JD, ids = torch.cat([states_JD, out_D[None]]), [*ids, found[-1]]
        return found

    def module(self, states_JD, embeds_JD):
        tokens, hidden = ("token_layernorm", "hidden_layernorm") if self.is_mimo else ("enorm", "hnorm")
        of_embeds, of_states = self.norm(embeds_JD, tokens), self.norm(states_JD, hidden)
        halves = [of_states, of_embeds] if self.is_mimo else [of_embeds, of_states]
        x = self.linear(torch.cat(halves, -1), "input_proj" if self.is_mimo else "eh_proj")
        x = x + self.attention(self.norm(x, "input_layernorm"))
        y = self.norm(x, "post_attention_layernorm")
        x = x + self.linear(F.silu(self.linear(y, "mlp.gate_proj")) * self.linear(y, "mlp.up_proj"), "mlp.down_proj")
        return self.norm(x, "final_layernorm" if self.is_mimo else "shared_head.norm")

    def attention(self, x):
        q, k, v = (
            self.linear(x, f"self_attn.{part}_proj").unflatten(1, (n, -1)).transpose(0, 1)
            for part, n in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        out = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
        return self.linear(out.transpose(0, 1).flatten(1), "self_attn.o_proj")

    def turned(self, x):
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] * self.theta ** (-torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def linear(self, x, name):
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def norm(self, x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.w[f"{name}.weight"]


@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_are_those_of_the_formulas_over_the_whole_text(both, monkeypatch, name):
    """In every batch, chunk, prefix hit and after every preemption: the module's cache holds what the text says it must."""
    kind, plain, folder = both
    with open_llm(folder, *SETTINGS[name]) as llm:
        made = texts_and_drafts(monkeypatch, Mtp, llm, preempts=name == "preempted")
    reference = Reference(kind, plain, folder)
    assert not [(text, ids) for text, ids in made if ids != reference.drafts(text, len(ids))]
    assert max(len(ids) for _, ids in made) == NUM_DRAFTS


def test_the_model_is_what_it_was_without_its_module(both):
    kind, plain, folder = both
    prompts = [[3, 1, 4, 1, 5], list(range(40))]
    found = []
    for path, spec in ((plain, None), (folder, None), (folder, "mtp")):
        with open_llm(path, spec=spec) as llm:
            found.append(generate(llm, prompts)[0])
            assert llm.engine.model_config.architecture == ("mimo" if kind == "mimo" and path == folder else KINDS[kind])
            assert ("spec.attention" in llm.engine.records) == (spec is not None)
    assert found[0] == found[1] == found[2]


def test_a_module_that_passes_the_embedding_on_is_always_right_over_count(tmp_path):
    """So drafts are accepted, by as many as are asked for."""
    folder = draft_heads.mtp(tmp_path / "count", rigs.count(tmp_path / "plain"), "deepseek")
    weights = load_file(folder / "model.safetensors")
    at = "model.layers.2."
    for name, weight in weights.items():
        if name.startswith(at):
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
            elif name.endswith("norm.weight"):
                weight.fill_(1.0)
    weights[f"{at}eh_proj.weight"] = torch.cat([torch.eye(64), torch.zeros(64, 64)], 1)
    save_file(weights, folder / "model.safetensors")
    with open_llm(folder) as llm:
        (tokens,), (accepted,) = generate(llm, [[5, 6, 7]], max_tokens=20)
    assert tokens == list(range(8, 28))
    assert accepted.count(NUM_DRAFTS) >= 4 and sum(accepted) == 20 - len(accepted)


def test_a_head_of_the_modules_own_is_used(tmp_path):
    """DeepSeek's format has room for one; all zeros but for one token, it proposes that token alone."""
    folder = draft_heads.mtp(tmp_path / "with", rigs.mix(tmp_path / "plain"), "deepseek")
    weights = load_file(folder / "model.safetensors")
    head = torch.zeros(256, 64)
    norm = "model.layers.2.shared_head.norm.weight"
    weights |= {"model.layers.2.shared_head.head.weight": head, norm: torch.zeros(64)}
    save_file(weights, folder / "model.safetensors")
    with open_llm(folder) as llm:
        generate(llm, [[3, 1, 4]], max_tokens=3)
        module = llm.engine._executor._runner._drafting._proposer._module
        assert module.lm_head is not llm.engine.model.lm_head
        assert module.greedy(torch.ones(2, 64)).tolist() == [0, 0]


def test_what_does_not_fit_is_refused(tmp_path):
    plain = rigs.mix(tmp_path / "plain", "qwen2")
    folder = draft_heads.mtp(tmp_path / "with", plain, "mimo")

    def refused(path, message, *overrides):
        with pytest.raises(UserError, match=message), open_llm(path, *overrides):
            pass

    refused(plain, r"has no multi-token-prediction module for this model: .*model\.mtp_layers\.0\.input_proj\.weight nor model")
    refused(folder, "spec.num_drafts must be", "spec.num_drafts=0")
    refused(folder, "spec.num_drafts 200: contexts have at most 128", "spec.num_drafts=200")
    refused(folder, "spec.head=/nowhere: there is no such folder", "spec.head=/nowhere")
    (tmp_path / "empty").mkdir()
    refused(folder, "holds no head: no file of weights", f"spec.head={tmp_path / 'empty'}")
    wide = draft_heads.mtp(tmp_path / "wide", plain, "mimo", hidden_size=96)
    refused(folder, r"token_layernorm\.weight' has shape \[96\]; the model needs \[64\]", f"spec.head={wide}")
    weights = load_file(folder / "model.safetensors")
    second = {name.replace("mtp_layers.0", "mtp_layers.1"): x.clone() for name, x in weights.items() if "mtp_layers.0" in name}
    save_file(weights | second, folder / "model.safetensors")
    refused(folder, "has several multi-token-prediction modules")
