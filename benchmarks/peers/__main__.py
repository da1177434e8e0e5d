"""Our recipes beside other engines: the same prompts, in turn, warm, several rounds; speeds and their ratios.

python -m benchmarks.peers                                  # all engines (environments are made first: minutes)
python -m benchmarks.peers --engines transformers --rounds 3
python -m benchmarks.peers --text FILE                      # perplexity on that text; without, on prose Python ships
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import python_of
from core.compose import compose
from core.lab.text import corpus
from core.models.source import cache_folder, read_spec, resolve
from core.models.tokenizer import load_tokenizer

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
VOCABULARY = 49_000
MAX_MODEL_LEN = 2048
SCORED_TOKENS, TIE = 8 * 1024, 1e-3
OURS: dict[str, tuple[str, list[str]]] = {
    "partwise cpu_fast": ("cpu_fast", ["drafter=none"]),
    "partwise premium_chat": ("premium_chat", ["drafter=none"]),
}
WORKLOADS = {
    "alone": "one request, 64 tokens, then 128 more; tokens a second",
    "sixteen": "16 requests at once, 64 tokens, then 64 more each; tokens a second",
    "prefill": "a prompt of 1,024 tokens, one token after it; prompt tokens a second",
    "agents": "8 branches that share 512 tokens, 3 rounds of 32 tokens; finished requests a second",
}
ENGINES = ("transformers", "vllm", "llama_cpp")
SCORED = ("partwise", "transformers")
ONE_AT_A_TIME = ("llama_cpp",)
"""Engines whose interface answers one prompt at a time: they are asked `alone` and `prefill` only."""


@dataclass
class Arm:
    """An engine in its process, and what it was measured at: figures by workload, in the order of the rounds."""

    name: str
    settings: dict[str, Any]
    process: subprocess.Popen[str]
    ready_seconds: float = 0.0
    peak_bytes: int = 0
    figures: dict[str, list[float]] = field(default_factory=dict)
    quality: str = "-"

    def ask(self, prompts: Sequence[Sequence[int]], n: int) -> tuple[float, list[list[int]]]:
        """Seconds, and each prompt's tokens."""
        answer = self._exchange({"prompts": prompts, "n": n})
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        tokens = answer["tokens"]
        if [len(each) for each in tokens] != [n] * len(prompts):
            raise SystemExit(f"{self.name} gave {[len(each) for each in tokens]} tokens where {n} each were asked")
        return answer["seconds"], tokens

    def score(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, int, float]]:
        """Of each token after a text's first: its log probability, the likeliest token, and by how much that leads."""
        return [tuple(token) for text in self._exchange({"texts": texts})["scores"] for token in text]

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        print(json.dumps(message), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def start(name: str, python: Path | str, settings: dict[str, Any]) -> Arm:
    """An engine loaded and ready."""
    threads = str(settings["threads"])
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    started = time.perf_counter()
    process = subprocess.Popen(
        [str(python), str(HERE / "worker.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | ({"PYTHONPATH": str(HERE.parents[1])} if settings["engine"] == "partwise" else {}),
    )
    arm = Arm(name, settings, process)
    arm._exchange(settings)
    arm.ready_seconds = time.perf_counter() - started
    return arm


def measure(arm: Arm, workload: str, seed: int) -> float:
    """One figure of one workload; every engine gets the same prompts for a seed."""
    rng = random.Random(f"{workload} {seed}")

    def prompt(n: int) -> list[int]:
        return [rng.randrange(10, VOCABULARY) for _ in range(n)]

    if workload == "prefill":
        return 1024 / arm.ask([prompt(1024)], 1)[0]
    if workload == "agents":
        return _agents(arm, prompt(512), [prompt(24) for _ in range(8)])
    prompts, n = ([prompt(64)], 128) if workload == "alone" else ([prompt(64) for _ in range(16)], 64)
    first, _ = arm.ask(prompts, 1)
    other = [[*each[1:], each[0]] for each in prompts]  # not answered from a cached prefix
    seconds, _ = arm.ask(other, 1 + n)
    return len(prompts) * n / max(seconds - first, 1e-9)


def _agents(arm: Arm, shared: list[int], branches: list[list[int]]) -> float:
    seconds = 0.0
    talks = [shared + branch for branch in branches]
    for _ in range(3):
        took, answers = arm.ask(talks, 32)
        seconds += took
        talks = [talk + answer for talk, answer in zip(talks, answers, strict=True)]
    return 3 * len(talks) / seconds


def workloads_of(arm: Arm) -> list[str]:
    return ["alone", "prefill"] if arm.settings["engine"] in ONE_AT_A_TIME else list(WORKLOADS)


def checkpoint(gguf: Path) -> Path:
    """The GGUF file's numbers as a folder of fp32, which transformers and vLLM open quickly; made once."""
    folder = cache_folder() / "peers" / f"{gguf.stem}-fp32"
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = type(model.config)(**{k: v for k, v in model.config.to_dict().items() if k != "quantization_config"})
        plain = AutoModelForCausalLM.from_config(config)
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(folder)
    return folder


def arms_of(engines: Sequence[str], threads: int) -> list[Arm]:
    gguf = resolve(read_spec(compose("premium_chat").model)).gguf
    assert gguf is not None
    common = {"threads": threads, "max_model_len": MAX_MODEL_LEN, "max_running": 64}
    found = []
    for name, (recipe, overrides) in OURS.items():
        words = [*overrides, f"engine.threads={threads}", f"engine.max_model_len={MAX_MODEL_LEN}"]
        words += ["scheduler.max_running=64", "scheduler.token_budget=256"]
        settings = {"engine": "partwise", "recipe": recipe, "overrides": words, "threads": threads}
        found.append(start(name, sys.executable, settings))
    for engine in engines:
        files = {"gguf": str(gguf)} if engine == "llama_cpp" else {"folder": str(checkpoint(gguf))}
        found.append(start(engine, python_of(engine), {"engine": engine, **files, **common}))
    return found


def run(arms: Sequence[Arm], workloads: Sequence[str], rounds: int) -> None:
    """Every workload of every engine once a round, after one round that is not counted; the order turns."""
    for round in range(rounds + 1):
        for workload in workloads:
            turn = round % len(arms)
            for arm in [*arms[turn:], *arms[:turn]]:
                if workload not in workloads_of(arm):
                    continue
                figure = measure(arm, workload, round)
                if round:
                    arm.figures.setdefault(workload, []).append(figure)
                print(f"round {round} {workload:8} {arm.name:18} {figure:10.1f}", file=sys.stderr, flush=True)


def weigh(arms: Sequence[Arm], text: str) -> None:
    """Fill in perplexity, its ratio to transformers' in fp32, and where another token is the likeliest (ties apart)."""
    reference = next((arm for arm in arms if arm.settings["engine"] == "transformers"), None)
    if reference is None:
        return
    tokenizer = load_tokenizer(resolve(read_spec(compose("premium_chat").model)))
    ids = tokenizer.encode(text)[:SCORED_TOKENS]
    texts = [ids[start : start + 1024] for start in range(0, len(ids), 1024)]
    wanted = reference.score(texts)
    for arm in arms:
        if arm.settings["engine"] not in SCORED:
            continue
        found = wanted if arm is reference else arm.score(texts)
        perplexity = _perplexity(found)
        others = sum(a[1] != b[1] for a, b in zip(found, wanted, strict=True) if b[2] > TIE)
        change = (perplexity / _perplexity(wanted) - 1) * 100
        arm.quality = f"{perplexity:.3f} ({change:+.2f} %; {others} of {len(wanted)} tokens differ)"


def _perplexity(scores: Sequence[tuple[float, int, float]]) -> float:
    return math.exp(-statistics.fmean(logprob for logprob, _, _ in scores))


def table(arms: Sequence[Arm]) -> list[str]:
    """Medians, and for others than the first engine the ratio of the first to them, round by round, with its range."""
    first = arms[0]
    heads = [*WORKLOADS, "start to ready, s", "peak memory, MB", "perplexity (against fp32)"]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for arm in arms:
        cells = [_cell(first, arm, workload) for workload in WORKLOADS]
        cells += [f"{arm.ready_seconds:.1f}", f"{arm.peak_bytes / 1e6:,.0f}", arm.quality]
        lines.append(f"| {arm.name} | {' | '.join(cells)} |")
    return lines


def _cell(first: Arm, arm: Arm, workload: str) -> str:
    figures = arm.figures.get(workload)
    if not figures:
        return "-"
    median = f"{statistics.median(figures):,.1f}"
    if arm is first:
        return median
    ratios = [ours / theirs for ours, theirs in zip(first.figures[workload], figures, strict=True)]
    return f"{median} (x{statistics.median(ratios):.2f}; {min(ratios):.2f} to {max(ratios):.2f})"


def report(arms: Sequence[Arm], rounds: int) -> str:
    head = [
        "# Beside other engines",
        "",
        f"SmolLM2-135M, {rounds} rounds, all engines in turn within a round; {date.today()}, {_machine()}. In "
        f"brackets: how many times as fast {arms[0].name} is, median and range over rounds.",
        "",
    ]
    meant = [f"- {name}: {text}" for name, text in WORKLOADS.items()]
    settings = [f"- {arm.name}: `{json.dumps(_shown(arm.settings))}`" for arm in arms]
    return "\n".join([*head, *table(arms), "", *meant, "", "Settings:", "", *settings]) + "\n"


def _machine() -> str:
    features = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    best = next((name for name in ("avx512f", "avx2") if name in features), "no AVX2")
    return f"{len(os.sched_getaffinity(0))} {platform.machine()} cores ({best})"


def _shown(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: Path(value).name if key in ("folder", "gguf") else value for key, value in settings.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=ENGINES)
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    arms = arms_of(options.engines, options.threads)
    try:
        run(arms, options.workloads, options.rounds)
        weigh(arms, options.text.read_text() if options.text else corpus("prose"))
    finally:
        for arm in arms:
            arm.process.kill()
            arm.process.wait()
    text = report(arms, options.rounds)
    options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
