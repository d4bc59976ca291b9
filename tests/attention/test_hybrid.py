"""hybrid: which rows go where, and which backends may stand beside each other. That it is right: the contract's checks."""

import pytest
import torch

from lab import registry
from lab.capabilities import Capabilities, Needs, common
from lab.checks.attention_trial import Case, Trial, spec_of
from lab.engine.resolution import resolve
from lab.errors import UserError
from lab.settings import PluginChoice

registry.discover()
HYBRID = registry.get("attention", "hybrid")
CPU = torch.device("cpu")
NEEDS = Needs(device="cpu", dtype="float32", kv_dtype="float32", head_dim=64, block_size=16)
MINE = '''
from lab.api import Attention, Capabilities, register


@register("attention", "{name}")
class Mine(Attention):
    """Declares limits only."""

    capabilities = Capabilities({limits})

    def kv_shape(self, num_blocks, block_size):
        return (num_blocks,)

    def plan(self, batch, reuse=None): ...
    def write(self, k_TKH, v_TKH, kv, slots_T): ...
    def attend(self, q_TNH, kv, plan, out_TNH): ...
    def export_blocks(self, kv, block_ids): ...
    def load_blocks(self, kv, block_ids, x_XB2KH): ...
'''


def with_plugin(own_registry, folder, name, limits):
    """The hybrid of a registry that knows a backend of that name with those limits as well."""
    (folder / f"{name}.py").write_text(MINE.format(name=name, limits=limits))
    own_registry.discover([folder])
    return own_registry.get("attention", "hybrid")


def parts_of(rows, **given):
    case = Case(rows)
    options = HYBRID.make_options(given)
    batch = Trial(case, CPU, seed=0).batch
    plan = HYBRID.load()(options, spec_of(case, CPU)).plan(batch)
    return [(p.name, p.tokens if isinstance(p.tokens, slice) else p.tokens.tolist()) for p in plan]


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        (((9, 1), (30, 1)), [("decode", slice(0, 2))]),
        (((0, 5), (30, 4)), [("prefill", slice(0, 9))]),
        (((9, 1), (30, 1), (0, 5), (4, 2)), [("decode", slice(0, 2)), ("prefill", slice(2, 9))]),
        (((9, 1), (0, 3), (30, 1), (4, 2)), [("decode", [0, 4]), ("prefill", [1, 2, 3, 5, 6])]),
    ],
)
def test_rows_of_one_token_are_decodes(rows, parts):
    assert parts_of(rows) == parts


def test_each_backend_has_its_own_options():
    options = HYBRID.make_options({"prefill": "flash", "decode": "flash", "decode_options": {"num_splits": 3}})
    backend = HYBRID.load()(options, spec_of(Case(()), CPU))
    assert backend._backends["decode"].options.num_splits == 3 and backend._backends["prefill"].options.num_splits == 0


def test_its_declaration_is_that_of_its_defaults():
    assert HYBRID.load().capabilities == HYBRID.with_options(HYBRID.options()).capabilities


def test_the_record_says_what_each_part_is():
    resolved = resolve("attention", PluginChoice("hybrid", {"prefill": "flex"}), NEEDS)
    assert {part: record["name"] for part, record in resolved.record["parts"].items()} == {"prefill": "flex", "decode": "eager"}
    assert resolved.record["parts"]["prefill"]["digest"] == registry.get("attention", "flex").digest
    assert resolved.record["parts"]["prefill"]["options"]["compiled"] is None
    assert "parts" not in resolve("attention", PluginChoice("eager"), NEEDS).record


def test_auto_never_takes_it():
    assert min(registry.entries("attention"), key=lambda e: e.capabilities.priority).name == "hybrid"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"prefill": "sdap"},
            "attention.prefill=sdap: no attention plugin named 'sdap'. Did you mean 'sdpa'?\nAvailable: eager",
        ),
        ({"decode": "flesh"}, "attention.decode=flesh: no attention plugin named 'flesh'. Did you mean 'flash'?"),
        (
            {"prefill": "flash", "decode": "flash", "prefill_options": {"num_split": 2}},
            "attention.prefill=flash: attention plugin 'flash' has no option 'num_split'. Did you mean 'num_splits'?",
        ),
        (
            {"decode": "flash"},
            "attention.prefill=sdpa and attention.decode=flash cannot share one cache: "
            "sdpa keeps it as 2PBKH, flash keeps it as PK2BH.\n"
            "Beside prefill=sdpa can stand decode=eager, fa, flashinfer, flex, sdpa; "
            "beside decode=flash can stand prefill=flash.",
        ),
        ({"decode": "fa"}, "device cpu (it runs on cuda); dtype float32 (it takes bfloat16, float16)"),
    ],
)
def test_what_cannot_be_is_told(given, says):
    with pytest.raises(UserError) as caught:
        resolve("attention", PluginChoice("hybrid", given), NEEDS)
    assert says in str(caught.value)


def test_a_backend_that_names_no_layout_stands_alone(own_registry, tmp_path):
    hybrid = with_plugin(own_registry, tmp_path, "mine", "devices={'cpu'}")
    with pytest.raises(UserError, match=r"mine keeps it as it likes \(its capabilities name no kv_layout\)"):
        hybrid.with_options(hybrid.make_options({"prefill": "mine"}))
    assert hybrid.with_options(hybrid.make_options({"prefill": "mine", "decode": "mine"})).capabilities.devices == {"cpu"}


def test_a_false_layout_is_refused(own_registry, tmp_path):
    hybrid = with_plugin(own_registry, tmp_path, "mine", "kv_layout='2PBKH'")
    with pytest.raises(UserError, match=r"give 3 blocks different shapes: \[3\] and \[2, 4, 16, 2, 64\]"):
        hybrid.load()(hybrid.make_options({"prefill": "mine"}), spec_of(Case(()), CPU))


@pytest.mark.parametrize(
    ("prefill", "decode", "graph"),
    [("eager", "mine", "decode"), ("mine", "eager", "never"), ("mine", "mine", "uniform")],
)
def test_graphs_hold_steps_that_go_to_one_backend(own_registry, tmp_path, prefill, decode, graph):
    hybrid = with_plugin(own_registry, tmp_path, "mine", "kv_layout='2PBKH', graph='any'")
    given = hybrid.make_options({"prefill": prefill, "decode": decode})
    assert hybrid.with_options(given).capabilities.graph == graph


def test_what_two_plugins_have_in_common():
    one = Capabilities(
        devices={"cpu", "cuda"}, dtypes={"float32", "bfloat16"}, block_multiple=4, features={"gqa", "lse"}, priority=3
    )
    other = Capabilities(dtypes={"bfloat16"}, head_dims={64}, block_multiple=6, features={"gqa"}, packages=("x",), priority=9)
    both = common(one, other, "both")
    assert (both.devices, both.dtypes, both.head_dims) == ({"cpu", "cuda"}, {"bfloat16"}, {64})
    assert (both.block_multiple, both.features, both.packages, both.priority) == (12, {"gqa"}, ("x",), 3)
    with pytest.raises(UserError, match="a and b have no dtypes in common: bfloat16, float32; float16."):
        common(one, Capabilities(dtypes={"float16"}), "a and b")
