"""Time of a step from a roofline, and of prefill, decode and speculation from steps.

The roofline (Williams, Waterman and Patterson, CACM 2009) takes the longer of moving the bytes and doing the
operations. It is applied to the linear layers and to attention each, since they run one after the other:

    step = overhead + sequences * sequence_overhead
         + max(weight bytes / bandwidth, 2 * parameters * tokens / rate)
         + max(KV bytes / bandwidth, attention operations / rate) + all-reduces

with the device's peak bandwidth and dense rate times the stated efficiencies. Bytes, operations and seconds
are those of one of the `tp` devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from core.plan.catalogue import Device
from core.plan.errors import PlanError
from core.plan.figures import Figure, assumed, derived
from core.plan.formats import weight_format
from core.plan.memory import REPLICATED, Budget
from core.plan.models import FILE, KVGroup, Model
from core.plan.recipe import Recipe

PCIE_4 = 32e9


class Efficiency(BaseModel):
    """Shares of the peak figures that real steps reach, and their fixed costs. `calibrate` measures them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bandwidth: Figure = assumed(
        0.8, "fraction", "ai-dynamo/aiconfigurator, empirical factor on memory bandwidth"
    )
    rate: Figure = assumed(0.6, "fraction", "our assumption for large products; calibrate to replace it")
    kv_bandwidth: Figure = assumed(0.8, "fraction", "taken as the bandwidth factor")
    attention_rate: Figure = assumed(0.4, "fraction", "our assumption; calibrate to replace it")
    overhead: Figure = assumed(0.5e-3, "s", "our assumption for launches and scheduling of one step")
    sequence_overhead: Figure = assumed(
        5e-6, "s", "our assumption for sampling and bookkeeping of one sequence"
    )
    link: Figure = assumed(
        PCIE_4, "B/s", "PCIe 4.0 x16 in one direction, where the catalogue knows no better link"
    )


@dataclass(frozen=True)
class Load:
    """What one step computes.

    `sequences` decode `each` tokens at `context`, and `chunk` prompt tokens follow `past` earlier ones.
    """

    sequences: int = 0
    context: int = 0
    each: int = 1
    chunk: int = 0
    past: int = 0

    @property
    def tokens(self) -> int:
        return self.sequences * self.each + self.chunk


@dataclass(frozen=True, kw_only=True)
class Step:
    """The time of one step and what it is made of."""

    seconds: float = derived("s")
    weight_bytes: float = derived("B")
    kv_bytes: float = derived("B")
    linear_operations: float = derived("op")
    attention_operations: float = derived("op")
    stream_seconds: float = derived("s")
    product_seconds: float = derived("s")
    kv_seconds: float = derived("s")
    attention_seconds: float = derived("s")
    communication_seconds: float = derived("s")
    overhead_seconds: float = derived("s")
    bound: str

    @property
    def intensity(self) -> float:
        """Operations for each byte moved."""
        return (self.linear_operations + self.attention_operations) / (self.weight_bytes + self.kv_bytes)


class Roofline:
    """Times the steps of one model on one device (or `tp` of them) under one recipe."""

    def __init__(
        self, model: Model, device: Device, recipe: Recipe, efficiency: Efficiency | None = None
    ) -> None:
        self.budget = Budget(model, device, recipe)
        self.given = model
        self.model = self.budget.model
        self.device = device
        self.recipe = recipe
        self.efficiency = efficiency or Efficiency()
        weights = model.checkpoint if recipe.weights == "checkpoint" else recipe.weights
        sixteen = ("bf16", "fp32")
        self.format_rate = device.rate(sixteen if weights == FILE else weight_format(weights).rates)
        self.rate = device.rate(("fp32",) if weights == "fp32" else sixteen)
        self.bandwidth = device.bandwidth
        self.link = device.link or self.efficiency.link

    @property
    def ridge(self) -> float:
        """Operations a byte above which the device is bound by its 16-bit rate, efficiencies included."""
        e = self.efficiency
        return self.rate.value * e.rate.value / (self.bandwidth.value * e.bandwidth.value)

    def step(self, load: Load) -> Step:
        """The time of one step of `load`. Every sequence reads its whole context, also what it shares."""
        if load.tokens <= 0:
            raise PlanError("a step needs at least one token")
        e, tp = self.efficiency, self.recipe.tp
        weights, quantized, rest = self._linear(load)
        kv, attention = self._attention(load)
        stream = weights / (self.bandwidth.value * e.bandwidth.value)
        product = (quantized / self.format_rate.value + rest / self.rate.value) / e.rate.value
        read = kv / (self.bandwidth.value * e.kv_bandwidth.value)
        score = attention / (self.rate.value * e.attention_rate.value)
        reduce = self._all_reduce_bytes(load.tokens) / self.link.value
        overhead = e.overhead.value + e.sequence_overhead.value * load.sequences
        parts = {
            "memory bandwidth (weights)": stream if stream >= product else 0.0,
            "matrix rate": product if product > stream else 0.0,
            "memory bandwidth (KV)": read if read >= score else 0.0,
            "matrix rate (attention)": score if score > read else 0.0,
            "link between devices": reduce,
            "overhead": overhead,
        }
        return Step(
            seconds=sum(parts.values()),
            weight_bytes=weights,
            kv_bytes=kv,
            linear_operations=(quantized + rest),
            attention_operations=attention,
            stream_seconds=stream,
            product_seconds=product,
            kv_seconds=read,
            attention_seconds=score,
            communication_seconds=reduce if tp > 1 else 0.0,
            overhead_seconds=overhead,
            bound=max(parts, key=lambda name: parts[name]),
        )

    def _linear(self, load: Load) -> tuple[float, float, float]:
        """Weight bytes read, operations in the weight format, and operations of the 16-bit matrices."""
        heads = load.sequences * load.each + (1 if load.chunk else 0)
        read, quantized, rest = 0.0, 0.0, 0.0
        lines = {line.kind: line for line in self.budget.lines}
        for m in self.model.matrices:
            line = lines[m.kind]
            share = 1 if m.kind in REPLICATED else self.recipe.tp
            tokens = heads if m.kind == "head" else load.tokens
            if m.kind == "embedding":
                read += line.bytes / m.rows * load.tokens
                continue
            touched = 1 - (1 - m.used) ** load.tokens
            read += line.bytes * m.parameters / share / line.parameters * touched
            operations = 0.0 if m.kind == "vectors" else 2 * m.parameters * m.used * tokens / share
            if self.model.quantized(m.kind):
                quantized += operations
            else:
                rest += operations
        return read, quantized, rest

    def _attention(self, load: Load) -> tuple[float, float]:
        """KV bytes moved and operations done by attention."""
        bytes_, operations = 0.0, 0.0
        for group in self.model.groups:
            share = min(self.recipe.tp, group.shards)
            token = self.budget.token_bytes(group)
            reach = min(load.context, group.window or load.context, group.read_limit or load.context)
            bytes_ += load.sequences * token * (reach + load.each)
            operations += load.sequences * load.each * reach * group.decode_ops * group.layers / share
            if load.chunk:
                pairs = attended(load.past, load.chunk, group)
                reach = min(load.past, group.window or load.past)
                bytes_ += token * (reach + 2 * load.chunk)
                operations += pairs * group.prefill_ops * group.layers / share
        return bytes_, operations

    def _all_reduce_bytes(self, tokens: int) -> float:
        """Bytes each device sends for two ring all-reduces a layer of 16-bit activations.

        Two a layer: Megatron-LM (arXiv 1909.08053); `2 (n - 1) / n` of the data: Patarasuk and Yuan, JPDC
        2009.
        """
        tp = self.recipe.tp
        return 2 * (tp - 1) / tp * 2 * self.model.shape.layers * tokens * self.model.shape.hidden * 2

    def decode(self, sequences: int, context: int) -> Step:
        """One decode step of `sequences` sequences; with speculation it verifies all drafted tokens."""
        return self.step(Load(sequences, context, self.recipe.verified))

    def token_seconds(self, sequences: int, context: int, chunk: int = 0, past: int = 0) -> float:
        """Seconds between tokens of a running stream: a step, and its drafts, for the tokens it accepts.

        With `chunk`, while a prompt is prefilled in chunks of that size (Sarathi-Serve, arXiv 2403.02310).
        """
        seconds = self.step(Load(sequences, context, self.recipe.verified, chunk, past)).seconds
        draft = self.recipe.speculation
        if draft is None:
            return seconds
        plain = self.step(Load(sequences, context)).seconds
        return (seconds + draft.tokens * draft.cost * plain) / expected_tokens(draft.accept, draft.tokens)

    def prefill(self, sequences: int = 0, context: int = 0, chunk: int | None = None) -> float:
        """Seconds to prefill one prompt while `sequences` streams decode: TTFT without waiting.

        Only the tokens that are not shared are computed. `chunk` defaults to the recipe's; without one the
        prompt runs in one step.
        """
        recipe = self.recipe
        past = self.budget.shared_tokens(recipe.prompt)
        size = chunk or recipe.chunk or recipe.prompt
        seconds = 0.0
        while past < recipe.prompt:
            tokens = min(size, recipe.prompt - past)
            seconds += self.step(Load(sequences, context, recipe.verified, tokens, past)).seconds
            past += tokens
        return seconds

    def prefill_alone(self) -> Step:
        """The prompt in one step of its own, for its arithmetic intensity and bound."""
        past = self.budget.shared_tokens(self.recipe.prompt)
        return self.step(Load(chunk=self.recipe.prompt - past, past=past))

    @property
    def last_chunk(self) -> tuple[int, int]:
        """The tokens of a prompt's most expensive full chunk, the last one, and how many come before it."""
        prompt = self.recipe.prompt
        shared = self.budget.shared_tokens(prompt)
        chunk = min(self.recipe.chunk or prompt, prompt - shared)
        return chunk, prompt - chunk


def attended(past: int, tokens: int, group: KVGroup) -> float:
    """Pairs of a query and an attended token when `tokens` follow `past`, causal, within the group's reach.

    `sum over i in 1..tokens of min(past + i, reach)`.
    """
    reach = min(group.window or 2**62, group.read_limit or 2**62)
    growing = max(0, min(tokens, reach - past))
    return growing * past + growing * (growing + 1) / 2 + (tokens - growing) * reach


def expected_tokens(accept: float, tokens: int) -> float:
    """Tokens of one verified step, bonus included: `(1 - a^(n+1)) / (1 - a)`; Leviathan, arXiv 2211.17192."""
    return sum(accept**i for i in range(tokens + 1))


def expected_tokens_by_position(accepts: list[float]) -> float:
    """The same with each position's own chance, given the ones before: `1 + sum of products`."""
    total, product = 1.0, 1.0
    for chance in accepts:
        product *= chance
        total += product
    return total


def speculation_speedup(accept: float, tokens: int, cost: float) -> float:
    """Published gain in time, `expected / (tokens * cost + 1)`: verification as cheap as one decode step.

    `cost` is the time of a draft token against a target step. Leviathan, arXiv 2211.17192. It holds while
    decode is bound by memory; `Roofline.token_seconds` prices the verified tokens and shows the gain fall
    with the batch.
    """
    return expected_tokens(accept, tokens) / (tokens * cost + 1)
