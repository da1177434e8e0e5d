"""One engine in a process of its own: a line of JSON in, a line of JSON out.

Runs in the engine's own environment, so it imports nothing of ours unless it is asked for our engine. The first line
in holds the engine's name and settings; the first line out says that it is ready. Each further line is a list of
prompts (token ids) and how many tokens to answer each with, always that many.
"""

import json
import resource
import sys
import time


def transformers_generate(settings):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(prompts, n):
        ids = torch.tensor(prompts)
        options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[:, ids.shape[1] :].tolist()

    return generate


def vllm(settings):
    from vllm import LLM, SamplingParams

    engine = LLM(
        settings["folder"],
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_running"],
    )

    def generate(prompts, n):
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(found.outputs[0].token_ids) for found in engine.generate(asked, params, use_tqdm=False)]

    return generate


def llama_cpp(settings):
    from llama_cpp import Llama

    threads = settings["threads"]
    engine = Llama(
        settings["gguf"],
        n_ctx=settings["max_model_len"],
        n_batch=512,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def generate(prompts, n):
        answers = []
        for prompt in prompts:
            tokens = engine.generate(prompt, temp=0.0)
            answers.append([next(tokens) for _ in range(n)])
        return answers

    return generate


def partwise(settings):
    from core import LLM

    engine = LLM(settings["recipe"], settings["overrides"])

    def generate(prompts, n):
        found = engine.generate(prompts, temperature=0, max_tokens=n, ignore_eos=True)
        return [result.token_ids for result in found]

    return generate


ENGINES = {"transformers": transformers_generate, "vllm": vllm, "llama_cpp": llama_cpp, "partwise": partwise}


def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    settings = json.loads(sys.stdin.readline())
    generate = ENGINES[settings["engine"]](settings)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        tokens = generate(asked["prompts"], asked["n"])
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "tokens": tokens, "peak_bytes": peak}), file=answers, flush=True)


if __name__ == "__main__":
    main()
