"""Memory: weights, KV, activations, what is left, and how many users or tokens that holds.

KV bytes a token are `2 * layers * kv_heads * head_dim * bytes` for MHA, GQA and MQA, `layers * (rank + rope)
* bytes` for a latent (DeepSeek-V2, arXiv 2405.04434, table 1), and a sliding layer stops growing at its
window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from core.plan.catalogue import Device
from core.plan.errors import PlanError
from core.plan.figures import derived, show_bytes
from core.plan.formats import KVFormat, kv_format
from core.plan.models import FILE, KVGroup, Model
from core.plan.recipe import Recipe

REPLICATED = frozenset({"router", "vectors"})


def kv_bytes(model: Model, kv: KVFormat, tokens: int) -> float:
    """Bytes that one sequence of `tokens` tokens keeps, windows respected, without rounding to pages."""
    return sum(g.token_bytes(kv) * min(tokens, g.window or tokens) for g in model.groups)


def kv_growth(model: Model, kv: KVFormat) -> float:
    """Bytes that one more token adds once all windows are full."""
    return sum(g.token_bytes(kv) for g in model.groups if g.window is None)


def kv_window(model: Model, kv: KVFormat) -> float:
    """Bytes of all full windows of one sequence: the part of its KV that does not grow."""
    return sum(g.token_bytes(kv) * g.window for g in model.groups if g.window is not None)


def kv_without_windows(model: Model, kv: KVFormat) -> float:
    """Bytes a token when every layer keeps all tokens: what an allocator that knows no windows reserves."""
    return sum(g.token_bytes(kv) for g in model.groups)


def latent_ratio(heads: int, head_dim: int, rank: int, rope: int) -> float:
    """How many times more elements MHA keeps than a latent: `2 * heads * head_dim / (rank + rope)`.

    Published ratios differ because the MHA side differs: against a 32-head model of head size 128 it is
    8,192 / 576 = 14.2, against DeepSeek-V2's own 128 heads 32,768 / 576 = 56.9. Neither model was sold as
    MHA.
    """
    return 2 * heads * head_dim / (rank + rope)


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n in 0..limit for which `fits(n)`, when fits holds for all smaller ones."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


@dataclass(frozen=True)
class WeightLine:
    """The weights of one kind on one device."""

    kind: str
    format: str
    parameters: int = derived("elements")
    bytes: float = derived("B")


@dataclass(frozen=True)
class Waste:
    """What an allocator holds but does not use, averaged over the life of a request."""

    allocator: str
    held_tokens: float = derived("tokens")
    used_tokens: float = derived("tokens")
    share: float = derived("fraction")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one device. `users` and `longest_context` are 0 where not even one fits."""

    budget_bytes: float = derived("B")
    weights: tuple[WeightLine, ...] = ()
    weight_bytes: float = derived("B")
    activation_bytes: float = derived("B")
    shared_kv_bytes: float = derived("B")
    left_bytes: float = derived("B")
    kv_token_bytes: float = derived("B/token")
    kv_window_bytes: float = derived("B")
    context: int = derived("tokens")
    kv_sequence_bytes: float = derived("B")
    users: int = derived("sequences")
    wanted_users: int = derived("sequences")
    longest_context: int = derived("tokens")
    missing_bytes: float = derived("B")
    fix: str | None = None
    waste: tuple[Waste, ...] = ()

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0


class Budget:
    """Bytes on one device of a model served by a recipe. All sizes are for one of the `tp` devices."""

    def __init__(self, model: Model, device: Device, recipe: Recipe) -> None:
        self.model = model.converted(recipe.structure)
        self.device = device
        self.recipe = recipe
        self.kv = kv_format(recipe.kv)
        if self.model.shape.heads % recipe.tp:
            raise PlanError(
                f"tp={recipe.tp} does not divide the {self.model.shape.heads} heads of {model.name}"
            )
        self.total = device.memory.value * recipe.memory_fraction
        weights = model.checkpoint if recipe.weights == "checkpoint" else recipe.weights
        if weights == FILE and self.model is not model:
            raise PlanError(
                "structure= cannot convert a file's own formats; name one, for example weights=bf16"
            )
        self.lines = self._weight_lines()
        self.weight_bytes = sum(line.bytes for line in self.lines)

    def _weight_lines(self) -> tuple[WeightLine, ...]:
        weights = self.recipe.weights
        name = self.model.checkpoint if weights == "checkpoint" else weights
        rest = name if name in (FILE, "fp32") else "16-bit"
        lines = []
        for kind in dict.fromkeys(m.kind for m in self.model.matrices):
            share = 1 if kind in REPLICATED else self.recipe.tp
            parameters = sum(m.parameters for m in self.model.matrices if m.kind == kind)
            lines.append(
                WeightLine(
                    kind,
                    name if self.model.quantized(kind) else rest,
                    parameters // share,
                    self.model.weight_bytes(weights, kind) / share,
                )
            )
        return tuple(lines)

    def activation_bytes(self, batch: int) -> float:
        """Working memory of one step: 16-bit values of the widest layer, and FP32 logits.

        An estimate that holds residual, normed input and the inputs and outputs of the widest layer at once,
        for the tokens of one prefill chunk and of all running sequences.
        """
        s, recipe = self.model.shape, self.recipe
        attention = s.heads * s.head_dim * 2 + 2 * s.kv_heads * s.head_dim
        mlp = (3 if s.gated else 2) * s.intermediate
        if s.experts is not None:
            mlp = 3 * (s.experts.used * s.experts.intermediate + s.experts.shared_intermediate)
        decodes = batch * recipe.verified
        tokens = decodes + min(recipe.chunk or recipe.prompt, recipe.prompt)
        width = 2 * s.hidden + max(attention, mlp) / recipe.tp
        return tokens * width * 2 + (decodes + 1) * s.vocab * 4 / recipe.tp

    def token_bytes(self, group: KVGroup) -> float:
        return group.token_bytes(self.kv) / min(self.recipe.tp, group.shards)

    def sequence_bytes(self, tokens: int) -> float:
        """What one sequence holds of its own: whole pages, or the whole run of a contiguous allocator."""
        shared = self.shared_tokens(tokens)
        total = 0.0
        for group in self.model.groups:
            held = self._held(tokens, group) - (shared if group.window is None else 0)
            total += held * self.token_bytes(group)
        return total

    def _held(self, tokens: int, group: KVGroup) -> int:
        if self.recipe.allocator == "contiguous":
            return tokens
        page = self.recipe.page
        pages = ceil(tokens / page)
        if group.window is not None:
            pages = min(pages, ceil((group.window - 1) / page) + 1)
        return pages * page

    def shared_tokens(self, tokens: int) -> int:
        """Tokens of full pages that every sequence of this length shares; the last token is always its own.

        Windows are not shared.
        """
        return min(self.recipe.shared, tokens - 1) // self.recipe.page * self.recipe.page

    def shared_bytes(self, tokens: int) -> float:
        shared = self.shared_tokens(tokens)
        return sum(shared * self.token_bytes(g) for g in self.model.groups if g.window is None)

    def needed(self, users: int, tokens: int) -> float:
        kv = users * self.sequence_bytes(tokens) + self.shared_bytes(tokens)
        return self.weight_bytes + self.activation_bytes(users) + kv

    def users_at(self, tokens: int, limit: int = 2**20) -> int:
        """Most sequences of `tokens` tokens that fit, none of which is ever preempted."""
        return largest(lambda n: self.needed(n, tokens) <= self.total, limit)

    def context_at(self, users: int) -> int:
        """Longest context that `users` sequences can have at once, at most the model's own limit."""
        return largest(lambda n: self.needed(users, n) <= self.total, self.model.shape.max_context)


def plan_memory(
    model: Model, device: Device, recipe: Recipe, users: int | None = None, context: int | None = None
) -> Memory:
    """The memory of one device for `users` sequences of `context` tokens.

    They default to the recipe's smallest batch and its longest request. Raises PlanError when the context or
    that request is beyond the model's limit.
    """
    context = context or recipe.longest
    users = users or recipe.min_batch
    budget = Budget(model, device, recipe)
    longest, limit = max(context, recipe.longest), model.shape.max_context
    if longest > limit:
        raise PlanError(
            f"{longest:,} tokens are beyond the {limit:,} that {model.name} takes; "
            f"lower context or the recipe's prompt and output_limit"
        )
    activations, shared = budget.activation_bytes(users), budget.shared_bytes(context)
    missing = max(0.0, budget.needed(users, context) - budget.total)
    return Memory(
        budget_bytes=budget.total,
        weights=budget.lines,
        weight_bytes=budget.weight_bytes,
        activation_bytes=activations,
        shared_kv_bytes=shared,
        left_bytes=budget.total - budget.weight_bytes - activations - shared,
        kv_token_bytes=sum(budget.token_bytes(g) for g in budget.model.groups if g.window is None),
        kv_window_bytes=sum(budget.token_bytes(g) * g.window for g in budget.model.groups if g.window),
        context=context,
        kv_sequence_bytes=budget.sequence_bytes(context),
        users=budget.users_at(context),
        wanted_users=users,
        longest_context=budget.context_at(users),
        missing_bytes=missing,
        fix=first_fix(model, device, recipe, users, context) if missing else None,
        waste=plan_waste(recipe),
    )


def plan_waste(recipe: Recipe) -> tuple[Waste, ...]:
    """How much of the held KV no token uses, for both allocators.

    A request holds its prompt and on average half its output. A contiguous allocator reserves the longest it
    may become; a paged one wastes half a page (PagedAttention, arXiv 2309.06180, which found 20.4 to 38.2 %
    used before).
    """
    used = recipe.prompt + recipe.output / 2
    held = {"contiguous": float(recipe.longest), f"paged, {recipe.page}": used + (recipe.page - 1) / 2}
    return tuple(Waste(name, tokens, used, 1 - used / tokens) for name, tokens in held.items())


def first_fix(model: Model, device: Device, recipe: Recipe, users: int, context: int) -> str:
    """The first change, from the least invasive on, that makes `users` sequences of `context` tokens fit."""
    eight = "fp8" if "fp8" in device.rates else "int8"
    steps: list[dict[str, Any]] = [
        *([{"allocator": "paged"}] if recipe.allocator == "contiguous" else []),
        {"kv": "fp8"},
        {"weights": eight},
        {"weights": eight, "kv": "fp8"},
        {"weights": "int4"},
        {"weights": "int4", "kv": "fp8"},
        *({"tp": recipe.tp * n} for n in (2, 4, 8)),
        *({"tp": recipe.tp * n, "weights": "int4", "kv": "fp8"} for n in (2, 4, 8)),
    ]
    for step in steps:
        try:
            fixed = Budget(model, device, recipe.model_copy(update=step))
        except PlanError:
            continue
        if fixed.needed(users, context) <= fixed.total:
            return ", ".join(f"recipe.{key}={value}" for key, value in step.items())
    budget = Budget(model, device, recipe)
    if most := budget.users_at(context):
        return f"at most {most:,} users of {context:,} tokens"
    if longest := budget.context_at(users):
        return f"at most {longest:,} tokens for {users:,} users"
    short = budget.needed(1, 1) - budget.total
    return f"a larger device: even one token is {show_bytes(short)} too much"
