"""Runs the forward pass of a step by its key: directly, or by replaying captured graphs over persistent buffers.

What capturing means is a `GraphRuntime`'s business. `CudaRuntime` records CUDA graphs into one shared memory pool. The policy
around it, which shapes, which inputs, which plans, has no device in it and is tried on the CPU with a runtime that records.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lab.compile.dispatch import BatchKey, Dispatcher
from lab.compile.executable import Executable, attend
from lab.compile.program import AttentionCall
from lab.context import ForwardContext, forward_context
from lab.contracts.attention import Attention
from lab.types import Watch

if TYPE_CHECKING:
    from lab.runner.batch import Batch, BatchBuilder

log = logging.getLogger("lab")

Model = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # input_ids_T, positions_T -> hidden_TD
PROBED_GRAPHS = 2  # captured to estimate what all of them will take


class Forward(Protocol):
    """The forward pass of a step."""

    num_graphs: int

    def run(self, key: BatchKey, batch: "Batch", kv: list[torch.Tensor]) -> torch.Tensor:
        """hidden_TD for the batch, which has the key's shape."""

    def watch(self, watch: Watch) -> None:
        """Let the calls that a forward pass is made of be timed, before any of them is made."""


class DirectForward:
    """Calls the model, or its compiled forms, with each step's own tensors.

    Args:
        backends: of each attention layer. Layers of different KV groups never share one: each is planned for its own.
        forms: the callable of each mode. `none` must be among them and stands in where the others are missing.
        group_of: the KV group of each layer, by default one for all.
    """

    num_graphs = 0

    def __init__(self, backends: list[Attention], forms: dict[str, Model], group_of: Sequence[int] = ()) -> None:
        self.backends = backends
        self.forms = forms
        self.group_of = tuple(group_of) or (0,) * len(backends)
        self._distinct = dict(zip(backends, self.group_of, strict=True))  # and the group that each plans for

    def run(self, key: BatchKey, batch: "Batch", kv: list[torch.Tensor]) -> torch.Tensor:
        model = self.forms.get(key.mode) or self.forms["none"]
        with forward_context(self.context(batch, kv, self.plans(batch, None))):
            return model(batch.input_ids_T, batch.positions_T)

    def watch(self, watch: Watch) -> None:
        """Attention's calls, the model's, and those of its compiled pieces."""
        for backend in self._distinct:
            for method, name in (("plan", "plan"), ("write", "attention write"), ("attend", "attention attend")):
                setattr(backend, method, watch(name, getattr(backend, method)))
        watched: dict[int, Model] = {}
        for mode, form in self.forms.items():
            if id(form) not in watched:
                if isinstance(form, Executable):
                    form.watch(watch)
                watched[id(form)] = watch("model", form)
            self.forms[mode] = watched[id(form)]

    def plans(self, batch: "Batch", reuse: list[Any] | None) -> list[Any]:
        """A plan for each distinct backend; with `reuse` the earlier ones, filled anew."""
        if reuse is None:
            return [backend.plan(batch.of_group(group)) for backend, group in self._distinct.items()]
        pairs = zip(self._distinct.items(), reuse, strict=True)
        return [backend.plan(batch.of_group(group), plan) for (backend, group), plan in pairs]

    def context(self, batch: "Batch", kv: list[torch.Tensor], plans: list[Any]) -> ForwardContext:
        of_backend = dict(zip(map(id, self._distinct), plans, strict=True))
        batches = [batch.of_group(group) for group in self.group_of] if batch.others else [batch] * len(self.backends)
        return ForwardContext(batches, self.backends, [of_backend[id(backend)] for backend in self.backends], kv)


class GraphRuntime(Protocol):
    """How a device records work and plays it again."""

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record `work`. Returns what replays it, and what `work` gave: tensors that every replay writes anew."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, not kept from being used again by what is captured later."""

    def capturing(self) -> AbstractContextManager[None]:
        """Around all captures of a store."""

    def forget(self) -> None:
        """Give back the memory of captures whose replays are gone."""

    def memory_in_use(self) -> int:
        """Bytes of the device that are taken now."""


class CudaRuntime:
    """CUDA graphs in one memory pool: of all captures only one is replayed at a time, so they may share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        # not torch.cuda.graph(), which collects garbage and empties the allocator's cache for each capture: there are thousands
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        return graph.replay, result

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.as_tensor(_Memory(tensor), device=tensor.device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """No garbage is collected meanwhile: what a destructor does may not be allowed while a stream is recorded."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
            torch.cuda.synchronize(self._device)

    def forget(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()  # a pool that was given back takes no more captures

    def memory_in_use(self) -> int:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class _Memory:
    """A tensor's memory from its first entry to its last, as bytes, in a form that torch makes tensors of which own nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        entries = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        self.__cuda_array_interface__ = {
            "shape": (entries * tensor.itemsize,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


@dataclass(slots=True)
class _Captured:
    """One key's graphs: replays and attention calls in order, with the plans that a full graph reads."""

    calls: list[Callable[[], None]]
    hidden_TD: torch.Tensor
    plans: list[Any] | None  # None: attention is not in the graph, and is planned anew for each step


class GraphStore:
    """Owns the captured graphs and their static tensors. Which one to replay is the dispatcher's choice.

    The builder must write every batch into the same persistent buffers, for captured graphs read their inputs there.
    """

    def __init__(
        self,
        direct: DirectForward,
        pieces: Executable | None,
        dispatcher: Dispatcher,
        builder: "BatchBuilder",
        runtime: GraphRuntime,
    ) -> None:
        assert builder.is_persistent, "captured graphs read their inputs at fixed addresses"
        self._direct = direct
        self._pieces = pieces
        self._keys = dispatcher.keys
        self._builder = builder
        self._runtime = runtime
        self._captured: dict[BatchKey, _Captured] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    def run(self, key: BatchKey, batch: "Batch", kv: list[torch.Tensor]) -> torch.Tensor:
        captured = self._captured.get(key)
        if captured is None:
            assert key.mode == "none", f"no graph was captured for {key}"
            return self._direct.run(key, batch, kv)
        plans = self._direct.plans(batch, captured.plans)
        with forward_context(self._direct.context(batch, kv, plans)):
            for call in captured.calls:
                call()
        return captured.hidden_TD

    def watch(self, watch: Watch) -> None:
        """Replays too, as `graph`; what runs inside one is hidden from the host."""
        self._direct.watch(watch)
        for key, captured in self._captured.items():
            between = self._pieces.calls if key.mode == "piecewise" else [None]
            captured.calls = [
                call if isinstance(kind, AttentionCall) else watch("graph", call)
                for call, kind in zip(captured.calls, between, strict=True)
            ]

    @torch.inference_mode()
    def capture(self, kv: list[torch.Tensor]) -> None:
        """Capture every key, the largest first so that the smaller ones fit into the memory of the pool."""
        begin = time.perf_counter()
        with self._runtime.capturing():
            for number, key in enumerate(self._keys, 1):
                if number == 1 or number % 10 == 0 or number == len(self._keys):
                    log.info("capturing graph %d of %d (%s, %d tokens)", number, len(self._keys), key.mode, key.num_tokens)
                self._captured[key] = self._capture(key, self._warm_up(key, kv), kv)
        if self._keys:
            log.info("captured %d graphs in %.1f s", len(self._keys), time.perf_counter() - begin)

    @torch.inference_mode()
    def estimate_bytes(self, kv: list[torch.Tensor]) -> int:
        """Device memory that capturing every key will take, from the first ones of each mode. Leaves nothing captured."""
        total = 0
        trials = []
        with self._runtime.capturing():
            for mode in sorted({key.mode for key in self._keys}):
                keys, taken = [key for key in self._keys if key.mode == mode], []
                for key in keys[:PROBED_GRAPHS]:
                    batch = self._warm_up(key, kv)
                    before = self._runtime.memory_in_use()
                    trials.append(self._capture(key, batch, kv))
                    taken.append(max(self._runtime.memory_in_use() - before, 0))
                total += taken[0] + taken[-1] * (len(keys) - 1)
        trials.clear()
        self._runtime.forget()
        return total

    def _warm_up(self, key: BatchKey, kv: list[torch.Tensor]) -> "Batch":
        """Run the key's shape once: lazy initialisation and autotuning must not be recorded. Returns the batch."""
        batch = self._builder.build_sample(key.num_tokens, key.num_rows, is_uniform=key.uniform_q > 0)
        self._direct.run(key, batch, kv)
        return batch

    def _capture(self, key: BatchKey, batch: "Batch", kv: list[torch.Tensor]) -> _Captured:
        if key.mode == "piecewise":
            return self._capture_pieces(batch)
        plans = self._direct.plans(batch, None)
        model = self._direct.forms.get("piecewise") or self._direct.forms["none"]
        with forward_context(self._direct.context(batch, kv, plans)):
            replay, hidden_TD = self._runtime.capture(lambda: model(batch.input_ids_T, batch.positions_T))
        return _Captured([replay], self._runtime.alias(hidden_TD), plans)

    def _capture_pieces(self, batch: "Batch") -> _Captured:
        """A graph for each piece. Attention between them gets aliases, so that layers and keys use the same memory again."""
        assert self._pieces is not None, "the dispatcher chose pieces where there are none"
        registers = self._pieces.registers(batch.input_ids_T, batch.positions_T)
        calls: list[Callable[[], None]] = []
        for call in self._pieces.calls:
            if isinstance(call, AttentionCall):
                calls.append(_attention_on(call, self._aliases(call, registers)))
                continue
            replay, values = self._runtime.capture(partial(call.run, registers.copy()))
            calls.append(replay)
            for register, value in zip(call.outputs, values, strict=True):
                registers[register] = value
        return _Captured(calls, self._runtime.alias(registers[self._pieces.program.output]), None)

    def _aliases(self, call: AttentionCall, registers: list[Any]) -> list[Any]:
        """Registers that hold nothing but what the call names."""
        named: list[Any] = [None] * len(registers)
        for register in (call.q, call.k, call.v, call.out):
            named[register] = self._runtime.alias(registers[register])
        return named


def _attention_on(call: AttentionCall, registers: list[Any]) -> Callable[[], None]:
    return lambda: attend(call, registers)
