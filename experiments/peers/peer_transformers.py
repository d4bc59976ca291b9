"""transformers: `generate` in eager mode with the sdpa kernel, which was faster here than a static cache with torch.compile.

Several requests make left-padded batches of like output length: `generate` runs a whole batch until its longest is done.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from harness.protocol import Generated, Peer, Request, Start, serve

BATCH = 32  # requests


class Transformers(Peer):
    PACKAGES = ("transformers", "torch")
    MODULES = ("torch", "transformers.models.llama.modeling_llama", "transformers.generation.utils")
    SETTINGS = f"bf16, sdpa, dynamic cache, eager; left-padded batches of {BATCH}, sorted by output length"

    @staticmethod
    def environment(start: Start) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_CACHE_DIR": start.cache}

    def __init__(self, start: Start) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(start.threads)
        self._model = AutoModelForCausalLM.from_pretrained(start.model, dtype=torch.bfloat16, attn_implementation="sdpa")
        self._model.eval()

    def generate(self, requests: Sequence[Request]) -> Generated:
        if len(requests) == 1:
            clock = _Clock()
            [token_ids] = self._generate(requests, clock)
            return Generated([token_ids], clock.moments)
        token_ids: list[list[int]] = [[] for _ in requests]
        for places in _batches(requests):
            answers = self._generate([requests[place] for place in places], None)
            for place, ids in zip(places, answers, strict=True):
                token_ids[place] = ids
        return Generated(token_ids)

    def _generate(self, batch: Sequence[Request], streamer: Any) -> list[list[int]]:
        import torch

        longest = max(len(request.prompt_ids) for request in batch)
        num_output = max(request.num_output for request in batch)
        pads = [longest - len(request.prompt_ids) for request in batch]
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=torch.tensor([[0] * pad + r.prompt_ids for pad, r in zip(pads, batch, strict=True)]),
                attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads]),
                do_sample=False,
                max_new_tokens=num_output,
                min_new_tokens=num_output,
                eos_token_id=None,
                pad_token_id=0,
                streamer=streamer,
            )
        return [row[longest : longest + r.num_output].tolist() for row, r in zip(output, batch, strict=True)]


class _Clock:
    """A streamer that notes when tokens come. The first thing it is given is the prompt."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self._prompt_seen = False

    def put(self, _: Any) -> None:
        if self._prompt_seen:
            self.moments.append(time.monotonic())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def _batches(requests: Sequence[Request]) -> Iterator[list[int]]:
    """The places of the requests of each batch."""
    order = sorted(range(len(requests)), key=lambda place: requests[place].num_output)
    for first in range(0, len(order), BATCH):
        yield order[first : first + BATCH]


if __name__ == "__main__":
    serve(Transformers)
