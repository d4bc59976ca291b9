"""Where a decode step's time goes, from slices and operators laid out by hand."""

from types import SimpleNamespace

import pytest

from lab.metrics.costs import AttentionShape, LinearShape, ModelCosts, StepShape
from lab.metrics.operators import Operator
from lab.metrics.profile import (
    EngineTime,
    Linears,
    WatchedStep,
    largest_prefills,
    operator_slices,
    parts_of,
    table,
    watched_steps,
)
from lab.metrics.roofline import DeviceFacts, floors
from lab.metrics.trace import Slice, nested
from tests.metrics.test_roofline import SMOL

MS = 1_000_000
LINEARS = Linears(frozenset({"own::linear", "aten::mm"}), ["qkv_proj", "o_proj"])
FACTS = DeviceFacts("test", "cpu", 2, 8 << 30, 40e9, {"bfloat16": 800e9}, "today")
SHAPE = StepShape(2, 2, [1, 1], [10, 20])


def ms(name, begin, end, args=None):
    return Slice(name, round(begin * MS), round(end * MS), args)


def op(name, begin, end):
    return Operator(name, round(begin * MS), round(end * MS))


def layout(*, wait_ms=2.0):
    """A step of 10 ms and what follows: batch 1, plan 0.5, two pieces 2 + 2, attention 0.5 + 1, lm_head 1, sampling 1."""
    return [
        ms("batch", 0.0, 1.0),
        ms("plan", 1.2, 1.7),
        ms("piece 0", 2.0, 4.0),
        ms("attention write", 4.0, 4.5),
        ms("attention attend", 4.5, 5.5),
        ms("piece 1", 5.6, 7.6),
        ms("model", 1.9, 7.8),
        ms("forward", 1.1, 7.9),
        ms("lm_head", 8.0, 9.0),
        ms("sample", 9.0, 10.0),
        ms("decode step", 0.0, 10.0, {"step": 7, "mode": "piecewise"}),
        ms("decode step", 10.0 + wait_ms, 20.0, {"step": 8, "mode": "piecewise"}),
    ]


OPERATORS = [
    op("own::linear", 2.5, 3.5),
    op("own::linear", 4.6, 5.2),  # attention's own use of the operator is no linear layer
    op("aten::mm", 5.7, 7.2),
    op("own::linear", 8.1, 8.9),  # lm_head
]


def step_of(slices=None, operators=OPERATORS):
    (step,) = watched_steps(slices or layout(), {7: operators}, {7: SHAPE})
    return step


def test_the_parts_are_disjoint_and_add_up_to_the_step():
    parts = parts_of(step_of(), LINEARS, EngineTime([]))
    expected = {
        "batch": 1.0,
        "plan": 0.5,
        "qkv_proj": 1.0,
        "o_proj": 1.5,
        "elementwise": 1.5,
        "attention write": 0.5,
        "attention attend": 1.0,
        "lm_head": 1.0,
        "sample": 1.0,
        "other": 1.0 + 2.0,  # Python in the step, and until the next one
    }
    assert parts == pytest.approx(expected)
    assert parts.total() == pytest.approx(12.0)


def test_the_engine_counts_only_while_the_runner_waits_for_it():
    engine = [ms("schedule", 1.0, 2.0), ms("update", 9.5, 10.5), ms("output", 10.5, 11.0), ms("idle", 11.0, 11.4)]
    time = EngineTime([*engine, ms("engine step", 0.0, 11.0)])
    parts = parts_of(step_of(), LINEARS, time)
    assert (parts["scheduler"], parts["output"]) == pytest.approx((0.5, 0.5))
    assert parts["other"] == pytest.approx(1.0 + 2.0 - 0.5 - 0.5 - 0.4)
    assert parts.total() == pytest.approx(12.0 - 0.4)  # waiting for requests is nobody's time
    assert time.within(0, 10 * MS) == pytest.approx({"scheduler": 1.5})


def test_operators_that_are_not_a_layer_each_stay_one_part():
    parts = parts_of(step_of(operators=OPERATORS[:1]), LINEARS, EngineTime([]))
    assert parts["linears"] == pytest.approx(1.0) and "qkv_proj" not in parts
    assert parts.total() == pytest.approx(12.0)


def test_without_pieces_the_operators_tell_python_from_the_rest():
    slices = [s for s in layout() if not s.name.startswith("piece")]
    operators = [*OPERATORS, op("aten::mul", 3.6, 3.8), op("lab::attention", 3.9, 5.54)]
    parts = parts_of(step_of(slices, operators), LINEARS, EngineTime([]))
    assert parts["elementwise"] == pytest.approx(0.2)
    assert (parts["qkv_proj"], parts["o_proj"]) == pytest.approx((1.0, 1.5))
    assert parts["other"] == pytest.approx(3.0 + 4.0 - 2.7)
    assert parts.total() == pytest.approx(12.0)


def test_operators_show_on_the_timeline_inside_the_slices_they_belong_to():
    late = [op("own::linear", 2.5, 4.3), *OPERATORS[1:]]  # the clocks differ: its end lies in attention
    slices = list(operator_slices([step_of(operators=late)], LINEARS))
    assert [(s.name, s.begin_ns, s.end_ns) for s in slices] == [
        ("qkv_proj", 2.5 * MS, 4.0 * MS),
        ("o_proj", 5.7 * MS, 7.2 * MS),
    ]
    roots = nested([*layout(), *slices])
    assert len(roots) == 2 and roots[0].innermost(3 * MS).slice.name == "qkv_proj"


def test_a_step_that_nothing_follows_is_left_out():
    assert watched_steps(layout()[:-1], {7: OPERATORS}, {7: SHAPE}) == []


def costs():
    sizes = {"qkv_proj": (576, 960), "o_proj": (576, 576), "gate_up_proj": (576, 3072), "down_proj": (1536, 576)}
    linears = [LinearShape(name, i, o, 2 * i * o) for _ in range(30) for name, (i, o) in sizes.items()]
    head = LinearShape("lm_head", 576, 49152, 2 * 576 * 49152)
    attention = [AttentionShape(9, 64, 2 * 3 * 64 * 2) for _ in range(30)]
    return ModelCosts(SimpleNamespace(**SMOL), linears, head, attention, 2)


def test_the_costs_of_all_parts_come_to_the_floors_of_the_model():
    floor = floors(SimpleNamespace(**SMOL), "bfloat16", FACTS)
    found = costs().of_step(StepShape(1, 1, [1], [500]))
    linear = [found[name] for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")]
    assert sum(cost.flops for cost in linear) == floor.flops_per_token
    assert sum(cost.bytes for cost in linear) == pytest.approx(floor.weights_read_bytes, rel=0.01)
    assert found["attention attend"].flops == 500 * floor.attention_flops_per_context_token
    assert found["attention attend"].bytes == pytest.approx(500 * floor.kv_bytes_per_token, rel=0.01)
    assert found["attention write"].bytes == 2 * floor.kv_bytes_per_token
    assert found["sample"].bytes == 49152 * 4
    assert "sample" not in costs().of_step(StepShape(1, 1, [1], [500]), reads_logits=False)


def test_a_window_bounds_what_attention_reads():
    model = costs()
    layers = [AttentionShape(9, 64, 768, window=100)] * 30
    narrow = ModelCosts(model.model, model.linears, model.lm_head, layers, 2).of_step(StepShape(2, 2, [1, 1], [500, 50]))
    assert narrow["attention attend"].flops == 30 * 4 * 576 * 150


@pytest.mark.parametrize("window", [None, 1, 3, 5, 8, 20])
@pytest.mark.parametrize(("q_len", "ctx_len"), [(1, 1), (1, 9), (4, 4), (4, 9), (9, 9)])
def test_a_prompts_tokens_see_the_keys_up_to_their_own(window, q_len, ctx_len):
    model = costs()
    one = ModelCosts(model.model, model.linears, model.lm_head, [AttentionShape(9, 64, 768, window)], 2)
    seen = sum(min(position + 1, window or ctx_len) for position in range(ctx_len - q_len, ctx_len))
    assert one.of_step(StepShape(q_len, 1, [q_len], [ctx_len]))["attention attend"].flops == 4 * 576 * seen


def test_the_largest_prefills_without_the_first_step_if_there_are_others():
    def steps(*sizes, kind="prefill step"):
        nodes = [SimpleNamespace(slice=ms(kind, 0.0, 1.0)) for _ in sizes]
        return [WatchedStep(node, [], StepShape(n, 0, [n], [n]), 0) for n, node in zip(sizes, nodes, strict=True)]

    for sizes, expected in (([], []), ([5], [0]), ([5, 5, 3, 5], [1, 3]), ([5, 3, 3], [0]), ([3, 5, 5], [1, 2])):
        watched = steps(*sizes)
        assert largest_prefills([*watched, *steps(9, kind="decode step")]) == [watched[i] for i in expected]


def test_a_prefills_floor_is_its_arithmetic():
    floor = floors(SimpleNamespace(**SMOL), "bfloat16", FACTS)
    (step,) = watched_steps(layout(), {7: OPERATORS}, {7: StepShape(2000, 1, [2000], [2000])})
    total = table([step], LINEARS, EngineTime([]), costs(), floor)["total"]
    assert total["floor_ms"] == pytest.approx(total["flops"] / 800e9 * 1e3) and total["floor_ms"] > floor.step_s(0, 2000) * 1e3


def test_the_table_sets_each_part_against_the_device():
    floor = floors(SimpleNamespace(**SMOL), "bfloat16", FACTS)
    found = table([step_of()], LINEARS, EngineTime([ms("schedule", 1.0, 2.0)]), costs(), floor)
    assert (found["steps"], found["num_requests"], found["context"], found["runner_ms"]) == ([7], 2, 15, 10.0)
    assert found["modes"] == {"piecewise": 1} and found["hidden_ms"] == {"scheduler": 1.0}
    lines = {line["name"]: line for line in found["parts"]}
    assert list(lines)[:4] == ["batch", "plan", "elementwise", "qkv_proj"] and list(lines)[-1] == "other"
    assert sum(line["ms"] for line in found["parts"]) == pytest.approx(found["total"]["ms"]) == 12.0
    assert sum(line["share"] for line in found["parts"]) == pytest.approx(1.0)
    head = lines["lm_head"]
    assert head["gb_per_s"] == pytest.approx(head["bytes"] / 1e6) == pytest.approx(2 * 576 * 49152 / 1e6, rel=0.01)
    assert head["bandwidth_share"] == pytest.approx(head["gb_per_s"] / 40)
    assert head["peak_share"] == pytest.approx(2 * 2 * 576 * 49152 / 1e-3 / 800e9)
    assert head["floor_ms"] == pytest.approx(head["bytes"] / 40e9 * 1e3)
    assert "bytes" not in lines["batch"]
    assert found["total"]["floor_ms"] == floor.step_s(2, 30) * 1e3


def test_a_step_that_needs_no_logits_moves_none():
    floor = floors(SimpleNamespace(**SMOL), "bfloat16", FACTS)
    slices = [ms("take greedy", 9.0, 10.0) if s.name == "sample" else s for s in layout()]
    found = table([step_of(slices)], LINEARS, EngineTime([]), costs(), floor)
    (line,) = (line for line in found["parts"] if line["name"] == "sample")
    assert line["ms"] == 1.0 and "bytes" not in line


def test_a_step_whose_operators_seem_misplaced_is_left_out_unless_all_are():
    floor = floors(SimpleNamespace(**SMOL), "bfloat16", FACTS)
    good, bad = step_of(), step_of(operators=OPERATORS[:1])
    assert [line["name"] for line in table([good, bad], LINEARS, EngineTime([]), costs(), floor)["parts"]].count("linears") == 0
    together = table([bad], LINEARS, EngineTime([]), costs(), floor)
    line = next(line for line in together["parts"] if line["name"] == "linears")
    layers = sum(linear.cost(2, 2).flops for linear in costs().linears)
    assert line["flops"] == layers and "qkv_proj" not in {part["name"] for part in together["parts"]}


def test_replayed_graphs_are_one_part_with_all_they_do():
    """A full graph holds the layers and attention; the head and the sampler are apart."""
    slices = [ms("graph", 2.0, 7.0) if s.name == "model" else s for s in layout()]
    slices = [s for s in slices if not s.name.startswith(("piece", "attention"))]
    floor = floors(SimpleNamespace(**SMOL), "bfloat16", FACTS)
    found = table([step_of(slices, [])], LINEARS, EngineTime([]), costs(), floor)
    lines = {line["name"]: line for line in found["parts"]}
    assert lines["graphs"]["ms"] == 5.0 and not lines.keys() & {"elementwise", "linears", "attention attend"}
    done = costs().of_step(SHAPE)
    inside = [cost for name, cost in done.items() if name not in ("lm_head", "sample")]
    assert lines["graphs"]["flops"] == sum(cost.flops for cost in inside)
    assert found["total"]["flops"] == sum(cost.flops for cost in done.values())
