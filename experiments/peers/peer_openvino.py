"""OpenVINO GenAI: the continuous batching pipeline, in bfloat16, on an IR with 16-bit weights."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.protocol import Generated, Peer, Request, Start, serve


class OpenVino(Peer):
    PACKAGES = ("openvino-genai", "openvino")
    MODULES = ("numpy", "openvino", "openvino_genai")
    SETTINGS = (
        "ContinuousBatchingPipeline, inference precision bf16, 16-bit weights, u8 KV cache (its default), "
        "dynamic split-fuse, prefix caching"
    )

    @staticmethod
    def prepare(model: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--task"]
        command += ["text-generation-with-past", "--model", str(model), "--weight-format", "fp16", str(folder)]
        subprocess.run(command, check=True, stdout=sys.stderr)

    def __init__(self, start: Start) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = start.max_len
        scheduler.max_num_seqs = start.max_seqs
        scheduler.cache_size = max(1, round(start.kv_bytes / 2**30))  # whole GB
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        self._pipeline = genai.ContinuousBatchingPipeline(
            start.prepared,
            scheduler,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": "bf16",
                "INFERENCE_NUM_THREADS": start.threads,
                "CACHE_DIR": f"{start.cache}/openvino",
            },
        )

    def generate(self, requests: Sequence[Request]) -> Generated:
        import numpy as np
        import openvino as ov

        prompts = [ov.Tensor(np.array([request.prompt_ids], dtype=np.int64)) for request in requests]
        if len(requests) > 1:
            results = self._pipeline.generate(prompts, [self._config(request) for request in requests])
            return Generated([list(result.m_generation_ids[0]) for result in results])
        handle = self._pipeline.add_request(0, prompts[0], self._config(requests[0]))
        token_ids: list[int] = []
        moments: list[float] = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            while handle.can_read():
                for output in handle.read().values():
                    token_ids += output.generated_ids
                    moments += [time.monotonic()] * len(output.generated_ids)
        return Generated([token_ids], moments)

    @staticmethod
    def _config(request: Request) -> Any:
        import openvino_genai as genai

        return genai.GenerationConfig(max_new_tokens=request.num_output, ignore_eos=True, do_sample=False)


if __name__ == "__main__":
    serve(OpenVino)
