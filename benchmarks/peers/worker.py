"""One engine in a process of its own: a line of JSON in, a line of JSON out.

Runs in the engine's own environment, so it imports nothing of ours unless it is asked for our engine. The first line
in holds the engine's name and settings; the first line out says that it is ready. Each further line is a list of
prompts (token ids) and how many tokens to answer each with, always that many; or a list of texts to score: the log
probability of each token after the first, the likeliest token in its place, and how far ahead of the next that one is.
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

    @torch.inference_mode()
    def score(texts):
        found = []
        for text in texts:
            ids = torch.tensor([text])
            logprobs = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            own = logprobs.gather(1, ids[0, 1:, None])[:, 0]
            best = logprobs.topk(2)
            gaps = best.values[:, 0] - best.values[:, 1]
            found.append(list(zip(own.tolist(), best.indices[:, 0].tolist(), gaps.tolist(), strict=True)))
        return found

    return generate, score


def vllm(settings):
    from vllm import LLM, SamplingParams

    engine = LLM(
        settings["folder"],
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_running"],
        gpu_memory_utilization=0.3,  # of this machine's memory: the name stands for all devices
    )

    def generate(prompts, n):
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(found.outputs[0].token_ids) for found in engine.generate(asked, params, use_tqdm=False)]

    return generate, None


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

    return generate, None


def partwise(settings):
    from core import LLM

    engine = LLM(settings["recipe"], settings["overrides"])

    def generate(prompts, n):
        found = engine.generate(prompts, temperature=0, max_tokens=n, ignore_eos=True)
        return [result.token_ids for result in found]

    def score(texts):
        scored = engine.generate(texts, temperature=0, max_tokens=1, prompt_logprobs=2)
        tops = [[(token, *token.top) for token in result.prompt_logprobs[1:]] for result in scored]
        return [[(own.logprob, a[0], a[1] - b[1]) for own, a, b in text] for text in tops]

    return generate, score


ENGINES = {"transformers": transformers_generate, "vllm": vllm, "llama_cpp": llama_cpp, "partwise": partwise}


def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    settings = json.loads(sys.stdin.readline())
    generate, score = ENGINES[settings["engine"]](settings)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "texts" in asked:
            print(json.dumps({"scores": score(asked["texts"])}), file=answers, flush=True)
            continue
        started = time.perf_counter()
        tokens = generate(asked["prompts"], asked["n"])
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "tokens": tokens, "peak_bytes": peak}), file=answers, flush=True)


if __name__ == "__main__":
    main()
