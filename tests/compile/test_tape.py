"""Pieces without Python: what is translated, what is refused, and that a tape computes what its wrapper does."""

import ctypes
import json
from pathlib import Path

import pytest
import torch

from lab.compile import tape, units
from lab.compile.program import AttentionCall
from lab.compile.tape import TapeUnit, Untranslatable, translate
from lab.metrics.operators import operator_names
from tests.compile.conftest import generate

WRAPPER = """
import torch
from torch._C._dynamo.guards import _empty_strided_cpu as empty_strided_cpu, _reinterpret_tensor as reinterpret_tensor

class Runner:
    def call(self, args):
        {parameters} = args
        args.clear()
        u0 = arg0_1
        if not u0 >= 1:
            raise RuntimeError('u0 >= 1')
{body}

call = Runner().call
"""


@pytest.fixture(scope="module", autouse=True)
def library():
    tape.load()


def wrapper(*body: str, parameters: str = "arg0_1, arg1_1") -> str:
    return WRAPPER.format(parameters=parameters, body="\n".join(f"        {line}" for line in body))


def run_both(source: str, template: list, registers: list) -> tuple[list, list]:
    """What the tape and the wrapper give. Arguments that `template` has not come from the registers, in order."""
    values = [(position, position) for position, given in enumerate(template) if given is None]
    both = [TapeUnit(translate(source, {})), units._load_module(source.encode(), {})]
    with torch.inference_mode():
        return tuple(list(unit.bind(template, values)(registers)) for unit in both)


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_views_operators_and_several_results(num_tokens):
    source = wrapper(
        "buf0 = torch.ops.aten.mul.Tensor(arg1_1, arg2_1)",
        "buf1 = buf0",
        "del buf0",
        "buf2 = torch.ops.aten.aminmax.default(buf1)",
        "buf3 = buf2[1]",
        "return (reinterpret_tensor(buf1, (2*u0, 2), (2, 1), 0), buf3)",
        parameters="arg0_1, arg1_1, arg2_1",
    )
    x, weight = torch.randn(num_tokens, 4), torch.randn(4)
    of_tape, of_wrapper = run_both(source, [None, None, weight], [num_tokens, x])
    assert of_tape[0].shape == (2 * num_tokens, 2) and torch.equal(of_tape[0], (x * weight).view(-1, 2))
    assert torch.equal(of_tape[1], (x * weight).amax())
    assert all(torch.equal(a, b) for a, b in zip(of_tape, of_wrapper, strict=True))


def test_constants_defaults_and_new_tensors():
    source = wrapper(
        "buf0 = empty_strided_cpu((u0, 3), (3, 1), torch.int32)",
        "buf1 = torch.ops.aten.fill.Scalar(buf0, 7)",
        "buf2 = torch.ops.aten.sum.dim_IntList(arg1_1, None, True)",
        "buf3 = torch.ops.aten.softplus.default(arg1_1, 1e-05)",
        "return (buf1, buf2, buf3)",
    )
    x = torch.randn(5, 2)
    of_tape, of_wrapper = run_both(source, [None, None], [5, x])
    assert torch.equal(of_tape[0], torch.full((5, 3), 7, dtype=torch.int32))
    assert torch.equal(of_tape[1], x.sum((0, 1), keepdim=True))
    assert torch.equal(of_tape[2], torch.nn.functional.softplus(x, 1e-5))
    assert all(torch.equal(a, b) for a, b in zip(of_tape, of_wrapper, strict=True))


def test_layers_share_a_tape_and_keep_their_own_weights():
    source = wrapper("buf0 = torch.ops.aten.mul.Tensor(arg1_1, arg2_1)", "return (buf0,)", parameters="arg0_1, arg1_1, arg2_1")
    unit = TapeUnit(translate(source, {}))
    runs = [unit.bind([None, None, torch.full((2,), float(n))], [(0, 0), (1, 1)]) for n in range(3)]
    found = [run([1, torch.ones(1, 2)])[0].tolist() for run in (*runs, *runs)]
    assert found == [[[n, n]] for n in (0, 1, 2, 0, 1, 2)]


def test_arguments_by_name():
    source = wrapper("buf0 = torch.ops.aten.add.Tensor(arg1_1, other=arg1_1, alpha=3)", "return (buf0,)")
    both = run_both(source, [None, None], [2, torch.tensor([1.0, 2.0])])
    assert [found.tolist() for (found,) in both] == [[4.0, 8.0]] * 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("buf0 = extern_kernels.mm(arg1_1, arg1_1)", "extern_kernels.mm"),
        ("buf0 = torch.ops.aten.neg.default(arg1_1, out=arg1_1)", "with out"),
        ("buf0 = torch.ops.aten.mul.Tensor(arg1_1)", "without its other"),
        ("buf0 = torch.ops.aten.mul.Tensor(arg1_1, 2.0)", "a number for its other"),
        ("buf0 = torch.ops.aten.sum.dim_IntList(arg1_1, (0, 1))", "as an argument"),
        ("buf0 = torch.ops.aten.item.default(arg1_1)", "something else than tensors"),
        ("buf0 = reinterpret_tensor(arg1_1, (u0*u0,), (1,), 0)", "square of the tokens"),
        ("buf0 = reinterpret_tensor(arg1_1, (u0//2,), (1,), 0)", "u0 // 2"),
        ("for _ in range(3): arg1_1.add_(1)", "for _ in range(3)"),
        ("unknown_loop(arg1_1)", "unknown_loop"),
        ("if not arg1_1 >= 1: raise RuntimeError('')", "arg1_1 >= 1"),
    ],
)
def test_what_no_step_stands_for_is_refused_with_its_text(line, reason):
    with pytest.raises(Untranslatable, match=reason.replace("(", r"\(").replace(")", r"\)").replace("*", r"\*")):
        translate(wrapper(line, "return (arg1_1,)"), {})


def test_a_wrapper_that_is_refused_runs_in_python(caplog):
    source = wrapper("arg1_1.add_(1)", "return (arg1_1,)")
    with caplog.at_level("INFO", "lab"):
        unit = units._load(4, source.encode(), {}, Path())
    assert isinstance(unit, units.ModuleUnit) and "piece 4 of the model is driven from Python" in caplog.text
    (found,) = unit.bind([None, None], [(0, 0), (1, 1)])([1, torch.zeros(2)])
    assert found.tolist() == [1, 1]


@ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_float), ctypes.POINTER(ctypes.c_float), ctypes.c_int64)
def double(given, made, count):
    for i in range(count):
        made[i] = 2 * given[i]


def test_loops_take_addresses_and_sizes():
    source = wrapper("buf0 = empty_strided_cpu((u0, 3), (3, 1), torch.float32)", "loop(arg1_1, buf0, 3*u0)", "return (buf0,)")
    unit = TapeUnit(translate(source, {"loop": ctypes.cast(double, ctypes.c_void_p).value}))
    x = torch.randn(4, 3)
    (found,) = unit.bind([None, None], [(0, 0), (1, 1)])([4, x])
    assert torch.equal(found, 2 * x)


def test_all_pieces_of_a_model_are_tapes_and_give_the_eager_tokens(open_llm, eager_tokens):
    """With kernels of our own for all that lies between attention calls, no piece calls a loop, which takes g++ ten seconds."""
    with open_llm() as llm:
        calls = llm.engine._executor._runner.forward.forms["piecewise"].calls
        assert all(isinstance(call, AttentionCall) or isinstance(call.unit, TapeUnit) for call in calls)
        tokens, _ = generate(llm)
    assert tokens == eager_tokens


def test_loops_that_inductor_wrote_give_what_they_give_from_python(open_llm, tmp_path):
    """In float16, for which there are no kernels of our own."""
    with open_llm("model.dtype=float16", f"compile.cache_dir={tmp_path}") as llm:
        pieces = llm.engine._executor._runner.forward.forms["piecewise"]
        first, bound = pieces.program.calls[0], pieces.calls[0]
        assert isinstance(bound.unit, TapeUnit)
        (folder,) = (file.parent for file in tmp_path.rglob("unit_0.py"))
        kernels = json.loads((folder / "manifest.json").read_text())["content"]["units"][0]["kernels"]
        assert kernels
        module = units._load_module((folder / "unit_0.py").read_bytes(), units._load_kernels(kernels, folder))
        registers = pieces.registers(torch.tensor([5, 7, 5], dtype=torch.int32), torch.tensor([0, 1, 9]))
        with torch.inference_mode():
            of_module = module.bind(bound.template, first.values)(registers)
            of_tape = bound.run(registers)
    compared = [torch.equal(a, b) for a, b in zip(of_tape, of_module, strict=True)]
    assert compared.count(True) >= len(compared) - 1  # one is the memory that attention will write into


def test_the_profiler_sees_the_operators_inside(library):
    unit = TapeUnit(translate(wrapper("buf0 = torch.ops.aten.mul.Scalar(arg1_1, 2.0)", "return (buf0,)"), {}))
    run = unit.bind([None, None], [(0, 0), (1, 1)])
    x = torch.ones(1)
    assert operator_names("cpu", lambda: run([1, x])) == {"aten::mul"}
