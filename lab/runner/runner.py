"""Executes steps on one device: rows in, one forward pass over all chunks, tokens out."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from lab.compile.dispatch import BatchKey, Dispatcher
from lab.compile.graphs import DirectForward, Forward
from lab.contracts.draft_length import DraftLength
from lab.contracts.spec import Proposer
from lab.kv.store import KVStore
from lab.runner.batch import Batch, BatchBuilder, Share
from lab.runner.buffers import InputBuffers
from lab.runner.draft_cache import scratch_positions
from lab.runner.drafting import Drafting
from lab.runner.rows import Rows
from lab.runner.trees import PathMover, Paths, kept_tokens
from lab.sample.sampler import SampleOutput, Sampler
from lab.types import Chunk, RowResult, Step, StepResult, TokenLogprobs, Watch

PROMPT_LOGITS_AT_ONCE = 256  # positions; whole-prompt logits of a large vocabulary would not fit


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes that the persistent state is made for."""

    max_rows: int
    max_model_len: int
    block_size: int
    vocab_size: int
    max_tokens: int  # of one step
    num_groups: int = 1  # KV groups


class Runner:
    """Owns the model, the KV tensors, the rows and the sampler. Plans nothing: it does what a `Step` says."""

    def __init__(
        self,
        model: nn.Module,
        forward: DirectForward,
        dispatcher: Dispatcher,
        store: KVStore,
        proposer: Proposer,
        limits: Limits,
        device: torch.device,
        draft_length: DraftLength | None = None,
    ) -> None:
        self.model = model
        self.forward: Forward = forward
        self.dispatcher = dispatcher
        self.store = store
        self.device = device
        self._limits = limits
        capacity = limits.max_model_len + proposer.num_drafts + 1
        if proposer.tree_depth:  # nodes are no tokens of the text: two steps' may lie behind the longest
            capacity += max(proposer.num_drafts + 1, scratch_positions(proposer))
        self.rows = Rows(limits.max_rows, capacity, limits.block_size, limits.num_groups)
        buffers = None
        if device.type != "cpu":
            num_tokens = max(limits.max_tokens, *(key.num_tokens for key in dispatcher.keys), 0)
            most_blocks = self.rows.blocks_RM.shape[1]
            buffers = InputBuffers(num_tokens, limits.max_rows, most_blocks, device, limits.num_groups)
        of_rows = self.rows, limits.block_size, device
        self.builder = BatchBuilder(*of_rows, buffers, limits.max_model_len, has_trees=proposer.tree_depth > 0)
        self._kept_builder = BatchBuilder(*of_rows, None, limits.max_model_len)
        self._mover = PathMover(self.rows, forward.backends, forward.group_of, limits.block_size)
        row_by_row = model.batch_invariant and device.type != "cpu"
        self._sampler = Sampler(limits.max_rows, limits.vocab_size, device, row_by_row=row_by_row)
        self._prompt_logprobs: dict[int, int] = {}  # rows that want them: how many alternatives
        self._drafting = Drafting(proposer, self.rows, limits.vocab_size, draft_length, self._sampler)
        self._drafting.attach(store, limits.block_size, limits.max_model_len, device)
        self._end_R = np.full(limits.max_rows, limits.max_model_len, np.int64)  # length at which each row ends

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Run a step: apply its changes to the rows, compute, sample, propose."""
        begin = time.perf_counter()
        self._apply_rows(step)
        if not step.chunks:
            return StepResult(step.index, [], (time.perf_counter() - begin) * 1e3)
        shares = [self._share(chunk) for chunk in step.chunks]
        key = self._key(shares)
        batch = self.builder.build(shares, key.num_tokens, key.num_rows)
        hidden_TD, aux_ATD = self.model.split(self.forward.run(key, batch, self.store.layers))
        prompt_logprobs = self._prompt_rows(shares, batch, hidden_TD)
        sampled, paths = self._sample(shares, batch, hidden_TD)
        if self._drafting.num_drafts:
            new_ids = [sampled[share.row][0] for share in shares if share.samples]
            self._drafting.observe(shares, new_ids, (time.perf_counter() - begin) * 1e3)
        drafts, draft_ms = self._draft(shares, paths, batch, hidden_TD, aux_ATD)
        results = []
        for chunk, share in zip(step.chunks, shares, strict=True):
            prompt = prompt_logprobs.get(share.row)
            if not share.samples:
                results.append(RowResult(chunk.request_id, [], prompt_logprobs=prompt))
                continue
            token_ids, logprobs = sampled[share.row]
            proposed = drafts.get(share.row, [])
            results.append(
                RowResult(
                    chunk.request_id, token_ids, share.num_drafts, logprobs, prompt, proposed, draft_depth=share.draft_depth
                )
            )
        ms = (time.perf_counter() - begin) * 1e3
        num_tokens = sum(share.num_tokens for share in shares)
        return StepResult(step.index, results, ms, key.mode, batch.num_tokens, draft_ms, num_tokens)

    def watch(self, watch: Watch) -> None:
        """Let each step and the calls it is made of be timed: `watch(name, call)` takes the place of each."""
        for owner, method, name in (
            (self, "execute", "step"),
            (self.builder, "build", "batch"),
            (self.forward, "run", "forward"),
            (self.model, "logits", "lm_head"),
            (self.model, "greedy", "lm_head"),
            (self._sampler, "run", "sample"),
            (self._sampler, "run_greedy", "take greedy"),
            (self._drafting, "show", "observe"),
            (self._drafting, "propose", "propose"),
        ):
            setattr(owner, method, watch(name, getattr(owner, method)))
        self.forward.watch(watch)

    def reset(self) -> None:
        """Forget every row."""
        for row in self.rows.clear():
            self._sampler.remove(row)
            self._drafting.forget(row)
        self._prompt_logprobs.clear()

    def replace_store(self, store: KVStore) -> None:
        """Take another KV pool; only while no row is live."""
        assert len(self.rows) == 0, "rows still point into the old pool"
        self.store = store
        self._drafting.attach(store, self._limits.block_size, self._limits.max_model_len, self.device)

    def _apply_rows(self, step: Step) -> None:
        for request_id in step.freed:
            row = self.rows.free(request_id)
            if row is not None:
                self._sampler.remove(row)
                self._drafting.forget(row)
                self._prompt_logprobs.pop(row, None)
        for new in step.new_rows:
            row = self.rows.add(new)
            self._drafting.start(row, new)
            self._sampler.add(row, new.params, new.seed, new.eos_ids, new.token_ids, new.num_prompt)
            if new.params.prompt_logprobs is not None:
                self._prompt_logprobs[row] = new.params.prompt_logprobs
            limit = self._limits.max_model_len
            if new.params.max_tokens is not None:
                limit = min(limit, new.num_prompt + new.params.max_tokens)
            self._end_R[row] = limit

    def _share(self, chunk: Chunk) -> Share:
        """The chunk as it really is: with a step with drafts in flight, the scheduler could only plan its upper bound."""
        rows = self.rows
        row = rows.apply(chunk)
        start = int(rows.num_computed_R[row])
        if not chunk.samples:
            assert start == chunk.start, f"{chunk.request_id}: planned from {chunk.start}, the row stands at {start}"
            return Share(row, start, chunk.num_tokens, 0, False)
        num_drafts = min(int(rows.num_drafts_R[row]), chunk.num_drafts)
        num_tokens = int(rows.lengths_R[row]) - start + num_drafts
        assert 0 < num_tokens <= chunk.num_tokens, f"{chunk.request_id}: {num_tokens} tokens of {chunk.num_tokens} planned"
        return Share(row, start, num_tokens, num_drafts, True, rows.tree(row, num_drafts))

    def _key(self, shares: list[Share]) -> BatchKey:
        """The shape that this step runs on."""
        uniform_q = self.dispatcher.uniform_q
        is_uniform = all(share.num_tokens == uniform_q for share in shares)
        return self.dispatcher.dispatch(sum(share.num_tokens for share in shares), len(shares), uniform=is_uniform)

    def _sample(
        self, shares: list[Share], batch: Batch, hidden_TD: torch.Tensor
    ) -> tuple[dict[int, tuple[list[int], list[TokenLogprobs] | None]], Paths]:
        """Verify and sample, and move the rows on: what each sampling row got, and the paths of those with trees."""
        rows = self.rows
        sampling = [s for s in shares if s.samples]
        sampled, paths = {}, {}
        if sampling:
            hidden_LD = hidden_TD if len(hidden_TD) == len(batch.logits_idx_L) else hidden_TD[batch.logits_idx_L]
            output = self._choose(sampling, hidden_LD)
            for index, share in enumerate(sampling):
                logprobs = output.logprobs[index] if output.logprobs is not None else None
                sampled[share.row] = (output.token_ids[index], logprobs)
                if share.tree is not None:
                    paths[share.row] = output.paths[index]
        if paths:
            self._mover.move(shares, paths, self.store)
        for share in shares:
            accepted = len(sampled[share.row][0]) - 1 if share.samples else 0
            rows.num_computed_R[share.row] = share.start + share.num_tokens - share.num_drafts + accepted
            if share.samples:
                rows.append(share.row, sampled[share.row][0])
        return sampled, paths

    def _draft(
        self, shares: list[Share], paths: Paths, batch: Batch, hidden_TD: torch.Tensor, aux_ATD: torch.Tensor | None
    ) -> tuple[dict[int, list[int]], float]:
        """The drafts of each sampling row for its next step, and how many ms they took."""
        begin = time.perf_counter()
        if self._drafting.observes:
            of_step = shares, batch, hidden_TD, aux_ATD
            self._drafting.show(*(self._without_rejected(paths, *of_step) if paths else of_step))
        row_ids = [share.row for share in shares if share.samples]
        proposed = self._drafting.propose(row_ids, self._end_R[row_ids])
        return proposed, (time.perf_counter() - begin) * 1e3

    def _without_rejected(
        self, paths: Paths, shares: list[Share], batch: Batch, hidden_TD: torch.Tensor, aux_ATD: torch.Tensor | None
    ) -> tuple[list[Share], Batch, torch.Tensor, torch.Tensor | None]:
        """The step as if it had computed the tokens that stand and no others."""
        num_kept = [int(self.rows.num_computed_R[share.row]) - share.start for share in shares]
        kept, index = kept_tokens(shares, paths, num_kept)
        index_X = torch.from_numpy(index).to(self.device)
        return kept, self._kept_builder.build(kept), hidden_TD[index_X], None if aux_ATD is None else aux_ATD[:, index_X]

    def _choose(self, sampling: list[Share], hidden_LD: torch.Tensor) -> SampleOutput:
        """The tokens of the sampling rows. The logits are computed only where more than their largest is wanted."""
        rows = [s.row for s in sampling]
        drafts = [self.rows.drafts(s.row, s.num_drafts) if s.num_drafts else [] for s in sampling]
        num_drafts = [s.num_drafts for s in sampling]
        trees = [s.tree for s in sampling]
        ids_L = None if self._sampler.needs_logits(rows) else self.model.greedy(hidden_LD)
        if ids_L is not None:
            return self._sampler.run_greedy(ids_L, rows, num_drafts, drafts, trees)
        logits_LV = self.model.logits(hidden_LD)
        return self._sampler.run(logits_LV, rows, num_drafts, drafts, self._drafting.probs(sampling), trees)

    def _prompt_rows(self, shares: list[Share], batch: Batch, hidden_TD: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of the prompt tokens that this step's positions predict, by row."""
        found: dict[int, list[TokenLogprobs]] = {}
        if not self._prompt_logprobs:
            return found
        for index, share in enumerate(shares):
            num_alternatives = self._prompt_logprobs.get(share.row)
            last = min(share.start + share.num_tokens, int(self.rows.num_prompt_R[share.row]) - 1)
            if num_alternatives is None or last <= share.start:
                continue
            entries: list[TokenLogprobs] = []
            offset = int(batch.q_start_R1_cpu[index]) - share.start
            for first in range(share.start, last, PROMPT_LOGITS_AT_ONCE):
                end = min(first + PROMPT_LOGITS_AT_ONCE, last)
                logits_XV = self.model.logits(hidden_TD[offset + first : offset + end])
                next_ids = self.rows.tokens_RC[share.row, first + 1 : end + 1].tolist()
                entries += self._sampler.prompt_logprobs(logits_XV, next_ids, num_alternatives)
            found[share.row] = entries
        return found
