"""LLM: generate for a list of prompts and return when all are done."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lab.engine.engine import Engine
from lab.engine.frontend import Prompt
from lab.engine.generation import Generation
from lab.engine.opened import Opened
from lab.engine.request_output import RequestOutput
from lab.engine.stack import Stack, engine_metrics
from lab.errors import UserError
from lab.interrupt import STOPPING, Interrupt, gentle_interrupt
from lab.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM(Opened):
    """A model ready to generate; also a context manager.

        with LLM("smollm2", attention="sdpa", overrides=["cache.block_size=32"]) as llm:
            outputs = llm.generate(["The capital of France is"], SamplingParams(max_tokens=16))

    One thread at a time may generate (AsyncLLM is for more), in the process that made it: its threads do not survive a fork.
    """

    def _start(self, stack: Stack) -> None:
        self._stack: Stack | None = stack
        self._at_work = threading.Lock()
        self._process = os.getpid()

    @property
    def engine(self) -> Engine:
        """The engine core, for studies that look inside."""
        return self._open_stack.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate for all prompts; the outputs are in their order.

        Args:
            prompts: strings, or mappings as `Frontend` takes them; or just one of them.
            sampling_params: one for all or one for each; by default those of the settings.
            progress: show a progress bar.

        Raises:
            UserError: when any prompt or parameter is wrong, or another thread generates. None of the prompts has run then.
            KeyboardInterrupt: on Ctrl-C, between two steps; what ran is aborted, and the LLM may be used again.
        """
        stack = self._open_stack
        if isinstance(prompts, (str, Mapping)):
            prompts = [prompts]
        elif not isinstance(prompts, Sequence):
            raise UserError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}.")
        each = _one_for_each(sampling_params, len(prompts))
        submissions = []
        for i, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
            with _naming_prompt(i, len(prompts)):
                submissions.append(stack.frontend.prepare(prompt, params))
        generations: list[Generation] = []
        with self._working(), gentle_interrupt(STOPPING) as interrupt:
            try:
                for i, submission in enumerate(submissions):
                    with _naming_prompt(i, len(prompts)):
                        generations.append(stack.outputs.submit(submission))
                self._run(generations, progress, interrupt)
            finally:  # on Ctrl-C and on a refusal nothing is left behind; after a full run this ends nothing
                for generation in generations:
                    stack.outputs.abort(generation)
        return [generation.output() for generation in generations]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate the assistant's turn for one conversation, or for each of a list of them, by the model's chat template."""
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            raise UserError(f"messages must be a list of messages or of conversations, got {type(messages).__name__}.")
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        return self.generate([{"messages": one} for one in conversations], sampling_params, progress=progress)

    def metrics(self) -> dict[str, Any]:
        """Counters of the engine since its start: requests, preemptions, prefix cache, KV blocks."""
        return engine_metrics(self._open_stack)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing changed, while requests hold blocks."""
        return self._open_stack.engine.reset_prefix_cache()

    def close(self) -> None:
        """Give everything back. Raises UserError while another thread generates."""
        if self._stack is None:
            return
        if os.getpid() != self._process:  # the threads that closing would wait for are not here
            self._stack = None
            return
        with self._working():
            stack, self._stack = self._stack, None
            stack.engine.close()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """While the engine is this thread's. Raises UserError where it is another's."""
        if os.getpid() != self._process:
            raise UserError("this LLM was made by another process, and its threads stayed there: make one in each process.")
        if not self._at_work.acquire(blocking=False):
            raise UserError("this LLM is generating in another thread: AsyncLLM serves several at once.")
        try:
            yield
        finally:
            self._at_work.release()

    @property
    def _open_stack(self) -> Stack:
        if self._stack is None:
            raise UserError("this LLM is closed: make another one.")
        return self._stack

    def _run(self, generations: list[Generation], progress: bool, interrupt: Interrupt) -> None:
        stack = self._open_stack
        with _progress(len(generations), progress) as advance:
            num_done = 0
            while num_done < len(generations):
                changed = stack.outputs.process(stack.engine.step())
                num_finished = sum(generation.finished for generation in changed)
                num_done += num_finished
                advance(num_finished)
                if interrupt.wanted:
                    raise KeyboardInterrupt


def _one_for_each(params: Params, num_prompts: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise UserError(f"sampling_params must be a SamplingParams or a list of them, got {type(params).__name__}.")
    if len(params) != num_prompts:
        raise UserError(f"sampling_params has {len(params)} entries for {num_prompts} prompts: give one, or one for each.")
    return list(params)


@contextmanager
def _naming_prompt(index: int, num_prompts: int) -> Iterator[None]:
    """Puts the number of the prompt before the message of a UserError, where there are several."""
    try:
        yield
    except UserError as error:
        if num_prompts == 1:
            raise
        raise UserError(f"prompts[{index}]: {error}") from None


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar of finished requests when `shown`; gives the function that moves it on."""
    if not shown:
        yield lambda num: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    with Progress("generating", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda num: bar.advance(task, num)
