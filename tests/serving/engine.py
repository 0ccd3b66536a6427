"""Run vLLM in its own process: a job as JSON on standard input, the answers as the last line of
output.

Job: {"engine": arguments of vllm.LLM, "batches": lists of prompts, "sampling": …}. Batches are
answered in order. A prompt is a text or a list of ids. "before": arguments of an engine that
answers the first batch in the same process and stays alive. "cancelled": numbers of requests that are
cancelled after three tokens; requests are then added one per step.
"""

from __future__ import annotations

import json
import os
import sys


def churn(llm, prompts, sampling, cancelled):
    """Answer prompts that arrive one per step. Cancelled requests have no output."""
    core, outs, waiting, stopped = llm.llm_engine, {}, list(enumerate(prompts)), set(map(str, cancelled))
    while waiting or core.has_unfinished_requests():
        if waiting:
            number, prompt = waiting.pop(0)
            core.add_request(str(number), {"prompt_token_ids": prompt["prompt_token_ids"]}, sampling)
        for out in core.step():
            outs[out.request_id] = out
            if out.request_id in stopped and len(out.outputs[0].token_ids) >= 3:
                core.abort_request([out.request_id])
                stopped.remove(out.request_id)
    return [outs[str(i)] for i in range(len(prompts)) if i not in set(cancelled)]


def main() -> None:
    """Read the job and answer it. Report the cache's token capacity and the number of preemptions."""
    job = json.load(sys.stdin)
    if job["engine"].get("tensor_parallel_size", 1) == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    first = LLM(**job["before"]) if job.get("before") else None
    llm = LLM(disable_log_stats=False, **job["engine"])
    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **job["sampling"])
    answers, cached = [], []
    for batch in job["batches"]:
        prompts = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in batch]
        if first is not None:
            first.generate(prompts, sampling, use_tqdm=False)
        cancelled = job.get("cancelled")
        outs = (
            llm.generate(prompts, sampling, use_tqdm=False)
            if cancelled is None
            else churn(llm, prompts, sampling, cancelled)
        )
        answers.append([list(out.outputs[0].token_ids) for out in outs])
        cached.append([out.num_cached_tokens for out in outs])
    held = llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
    preempted = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    result = {"answers": answers, "cached": cached, "capacity": held, "preempted": preempted}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
