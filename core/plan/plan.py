"""A whole plan: memory, times, the batch that meets the targets, rates and cost; and the ranking."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from core.plan.catalogue import Device, Price
from core.plan.errors import PlanError
from core.plan.figures import derived, show_bytes, show_seconds
from core.plan.latency import Efficiency, Load, Roofline, Step, expected_tokens, speculation_speedup
from core.plan.memory import Memory, largest, plan_memory
from core.plan.models import Model
from core.plan.recipe import Recipe

HOUR = 3600


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What speculation brings at the planned batch."""

    tokens_per_step: float = derived("tokens")
    published_speedup: float = derived("fraction")
    priced_speedup: float = derived("fraction")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How the model serves at the planned batch.

    Times between tokens: `itl_seconds` while nothing is prefilled, `itl_in_prefill_seconds` while a prompt's
    last chunk runs along, `itl_unchunked_seconds` if that prompt ran in one step. Rates are requests a second
    of one replica: `full_rate` with the batch always full, `rate` at the recipe's utilization.
    """

    batch: int = derived("sequences")
    limited_by: str
    itl_seconds: float = derived("s")
    itl_in_prefill_seconds: float = derived("s")
    itl_unchunked_seconds: float = derived("s")
    ttft_seconds: float = derived("s")
    full_rate: float = derived("requests/s")
    rate: float = derived("requests/s")
    input_tokens_per_second: float = derived("tokens/s")
    output_tokens_per_second: float = derived("tokens/s")
    in_system: float = derived("requests")
    speculation: Gain | None = None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """US dollars for a million tokens at the served rate, and devices for the wanted traffic."""

    price: Price
    input_per_million: float = derived("USD/1M tokens")
    output_per_million: float = derived("USD/1M tokens")
    blended_per_million: float = derived("USD/1M tokens")
    per_request: float = derived("USD")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Devices for a given traffic."""

    requests_per_second: float = derived("requests/s")
    replicas: int = derived("replicas")
    devices: int = derived("devices")
    usd_per_hour: float | None = derived("USD/h")


@dataclass(frozen=True, kw_only=True)
class Impossible:
    """A target that no batch meets, the best that can be reached, and what would help."""

    target: str
    wanted: str
    best: str
    advice: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of one model on one device.

    Steps: `prefill` of one prompt alone, `decode` at the planned batch, and `asked`, a decode of the users
    and context that memory was asked for. `serving` is None when memory or a target makes it impossible.
    """

    model: Model
    device: Device
    recipe: Recipe
    efficiency: Efficiency
    memory: Memory
    prefill: Step
    decode: Step
    asked: Step
    ridge: float = derived("op/B")
    serving: Serving | None
    impossible: tuple[Impossible, ...] = ()
    cost: Cost | None = None
    traffic: Traffic | None = None

    @property
    def ok(self) -> bool:
        return self.memory.fits and self.serving is not None


class Server:
    """Rates and times of one roofline by batch, at the average context of a request."""

    def __init__(self, roofline: Roofline) -> None:
        self.roofline = roofline
        self.recipe = recipe = roofline.recipe
        self.context = recipe.prompt + recipe.output // 2
        self.users = min(roofline.budget.users_at(recipe.longest, recipe.max_batch), recipe.max_batch)

    def itl(self, batch: int) -> float:
        return self.roofline.token_seconds(batch, self.context)

    def itl_in_prefill(self, batch: int) -> float:
        chunk, past = self.roofline.last_chunk
        return self.roofline.token_seconds(batch, self.context, chunk, past)

    def itl_unchunked(self, batch: int) -> float:
        past = self.roofline.budget.shared_tokens(self.recipe.prompt)
        return self.roofline.token_seconds(batch, self.context, self.recipe.prompt - past, past)

    def ttft(self, batch: int) -> float:
        return self.roofline.prefill(batch - 1, self.context)

    def prefill_share(self, batch: int) -> float:
        """Seconds that one prompt adds to the steps of a full batch."""
        recipe = self.recipe
        past, seconds = self.roofline.budget.shared_tokens(recipe.prompt), 0.0
        plain = self.roofline.decode(batch, self.context).seconds
        while past < recipe.prompt:
            tokens = min(recipe.chunk or recipe.prompt, recipe.prompt - past)
            load = Load(batch, self.context, recipe.verified, tokens, past)
            seconds += self.roofline.step(load).seconds - plain
            past += tokens
        return seconds

    def prefill_rate(self, batch: int) -> float:
        """Requests a second when every step carries all prompt tokens it may: `chunk`, or one prompt."""
        recipe, shared = self.recipe, self.roofline.budget.shared_tokens(self.recipe.prompt)
        new = recipe.prompt - shared
        if recipe.chunk is None or recipe.chunk <= new:
            return 1 / self.roofline.prefill(batch, self.context)
        load = Load(batch, self.context, recipe.verified, recipe.chunk, shared)
        return recipe.chunk / new / self.roofline.step(load).seconds

    def rate(self, batch: int) -> float:
        """Requests a second with `batch` always running: each costs its prefill and a share of steps.

        Little's law, `batch = rate * time in decode`, where prefills stretch the time in decode; but never
        more than the prompts that fit into the steps.
        """
        cost = self.prefill_share(batch) + self.recipe.output * self.itl(batch) / batch
        return min(1 / cost, self.prefill_rate(batch))

    def meets(self, batch: int) -> bool:
        return not self.misses(batch)

    def misses(self, batch: int) -> list[tuple[str, float, float]]:
        """Targets that a batch misses: name, wanted seconds, reached seconds."""
        reached = {
            "itl_ms": (self.recipe.itl_ms, self.itl_in_prefill),
            "ttft_ms": (self.recipe.ttft_ms, self.ttft),
        }
        out = []
        for name, (wanted, time) in reached.items():
            if wanted is not None and (seconds := time(batch)) > wanted / 1e3:
                out.append((name, wanted / 1e3, seconds))
        return out

    def candidates(self, most: int) -> list[int]:
        sizes = {self.recipe.min_batch, most}
        sizes.update(round(2 ** (i / 4)) for i in range(4 * most.bit_length()))
        return sorted(n for n in sizes if self.recipe.min_batch <= n <= most)

    def choose(self) -> int:
        """Latency first: the largest batch that meets the targets; throughput first: the best rate."""
        most = largest(self.meets, self.users)
        if self.recipe.goal == "latency":
            return most
        sizes = self.candidates(most)
        near = sizes.index(max(sizes, key=self.rate))
        low, high = sizes[max(near - 1, 0)], sizes[min(near + 1, len(sizes) - 1)]
        return max(range(low, high + 1, max(1, (high - low) // 32)), key=self.rate)

    def limit(self, batch: int) -> str:
        if batch < self.users:
            misses = self.misses(batch + 1)
            return misses[0][0] if misses else "the best rate"
        return "max_batch" if batch == self.recipe.max_batch else "memory"


def make_plan(
    model: Model,
    device: Device,
    recipe: Recipe,
    *,
    efficiency: Efficiency | None = None,
    price: Price | None = None,
    users: int | None = None,
    context: int | None = None,
    traffic: float | None = None,
) -> Plan:
    """Plan one model on one device (or `recipe.tp` of them).

    `users` and `context` ask whether that many sequences of that length fit; `traffic` is in requests a
    second; `price` is for one device and hour and defaults to the catalogue's. Raises PlanError for what
    cannot be planned at all; a plan that does not fit or misses its targets is returned and says so.
    """
    efficiency = efficiency or Efficiency()
    memory = plan_memory(model, device, recipe, users, context)
    roofline = Roofline(model, device, recipe, efficiency)
    server = Server(roofline)
    impossible = tuple(_impossible(server))
    batch = 0 if impossible else server.choose()
    serving = _serving(server, batch) if batch else None
    price = price or device.price()
    return Plan(
        model=model,
        device=device,
        recipe=recipe,
        efficiency=efficiency,
        memory=memory,
        prefill=roofline.prefill_alone(),
        decode=roofline.decode(batch or recipe.min_batch, server.context),
        asked=roofline.decode(memory.wanted_users, memory.context),
        ridge=roofline.ridge,
        serving=serving,
        impossible=impossible,
        cost=_cost(server, serving, price) if serving and price else None,
        traffic=_traffic(recipe, serving, price, traffic) if serving and traffic else None,
    )


def _impossible(server: Server) -> Iterable[Impossible]:
    recipe, smallest = server.recipe, server.recipe.min_batch
    if server.users < smallest:
        yield Impossible(
            target="min_batch",
            wanted=f"{smallest} x {recipe.longest:,} tokens",
            best=f"{server.users}",
            advice=plan_memory(
                server.roofline.given, server.roofline.device, recipe, smallest, recipe.longest
            ).fix,
        )
        return
    misses = server.misses(smallest)
    advice = _chunk_advice(server) if misses else None
    for name, wanted, reached in misses:
        best = min(reached, _best(server, name))
        text = f"{show_seconds(best)} at batch {smallest}"
        yield Impossible(target=name, wanted=show_seconds(wanted), best=text, advice=advice)


def _with_chunk(server: Server, chunk: int | None) -> Server:
    r = server.roofline
    return Server(Roofline(r.given, r.device, r.recipe.model_copy(update={"chunk": chunk}), r.efficiency))


def _chunks(recipe: Recipe) -> list[int]:
    return [n for n in (2**i for i in range(5, 20)) if n < recipe.prompt] + [recipe.prompt]


def _best(server: Server, target: str) -> float:
    """The best a target can be at the smallest batch, over all chunk sizes."""
    batch = server.recipe.min_batch
    trials = [_with_chunk(server, n) for n in _chunks(server.recipe)]
    return min(t.itl_in_prefill(batch) if target == "itl_ms" else t.ttft(batch) for t in trials)


def _chunk_advice(server: Server) -> str | None:
    good = [n for n in _chunks(server.recipe) if _with_chunk(server, n).meets(server.recipe.min_batch)]
    return f"recipe.chunk={good[-1]}" if good else None


def _serving(server: Server, batch: int) -> Serving:
    recipe = server.recipe
    full = server.rate(batch)
    rate = full * recipe.utilization
    ttft = server.ttft(batch)
    return Serving(
        batch=batch,
        limited_by=server.limit(batch),
        itl_seconds=server.itl(batch),
        itl_in_prefill_seconds=server.itl_in_prefill(batch),
        itl_unchunked_seconds=server.itl_unchunked(batch),
        ttft_seconds=ttft,
        full_rate=full,
        rate=rate,
        input_tokens_per_second=rate * recipe.prompt,
        output_tokens_per_second=rate * recipe.output,
        in_system=rate * (ttft + batch / full),
        speculation=_gain(server, batch),
    )


def _gain(server: Server, batch: int) -> Gain | None:
    draft = server.recipe.speculation
    if draft is None:
        return None
    plain = server.roofline.step(Load(batch, server.context)).seconds
    return Gain(
        tokens_per_step=expected_tokens(draft.accept, draft.tokens),
        published_speedup=speculation_speedup(draft.accept, draft.tokens, draft.cost),
        priced_speedup=plain / server.itl(batch),
    )


def _cost(server: Server, serving: Serving, price: Price) -> Cost:
    """A request's cost, split between input and output as prefill alone and decode at the batch take time."""
    recipe = server.recipe
    request = price.usd_per_hour * recipe.tp / HOUR / serving.rate
    prefill = server.roofline.prefill()
    share = prefill / (prefill + recipe.output * serving.itl_seconds / serving.batch)
    return Cost(
        price=price,
        input_per_million=request * share / recipe.prompt * 1e6,
        output_per_million=request * (1 - share) / recipe.output * 1e6,
        blended_per_million=request / (recipe.prompt + recipe.output) * 1e6,
        per_request=request,
    )


def _traffic(recipe: Recipe, serving: Serving, price: Price | None, requests: float) -> Traffic:
    replicas = ceil(requests / serving.rate)
    devices = replicas * recipe.tp
    return Traffic(
        requests_per_second=requests,
        replicas=replicas,
        devices=devices,
        usd_per_hour=devices * price.usd_per_hour if price else None,
    )


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One device of a ranking, and why it is not the first."""

    name: str
    plan: Plan | None
    reason: str


def rank(plans: Iterable[tuple[str, Plan | PlanError]]) -> list[Ranked]:
    """Best first: by cost a token, then those without a price by rate, then the impossible ones."""
    ordered = sorted(plans, key=lambda item: _order(item[1]))
    best = ordered[0][1] if ordered else None
    return [
        Ranked(name=name, plan=plan if isinstance(plan, Plan) else None, reason=_reason(plan, best))
        for name, plan in ordered
    ]


def _order(plan: Plan | PlanError) -> tuple[int, float]:
    if isinstance(plan, PlanError) or not plan.ok or plan.serving is None:
        return 2, 0.0
    if plan.cost is None:
        return 1, -plan.serving.rate
    return 0, plan.cost.blended_per_million


def _reason(plan: Plan | PlanError, best: Plan | PlanError | None) -> str:
    if isinstance(plan, PlanError):
        return str(plan)
    if plan.serving is None or not plan.memory.fits:
        return why_impossible(plan)
    if plan is best:
        return "the lowest cost a token" if plan.cost else "the highest rate; no price known"
    if plan.cost is None:
        return "no price with a date; give price= and price_date="
    assert isinstance(best, Plan) and best.cost is not None and best.serving is not None
    times = plan.cost.blended_per_million / best.cost.blended_per_million
    speed = best.serving.rate / plan.serving.rate
    hour = plan.cost.price.usd_per_hour * plan.recipe.tp / (best.cost.price.usd_per_hour * best.recipe.tp)
    dearer = f"{hour:.2f} times the price an hour"
    slower = f"{speed:.2f} times slower" if speed >= 1 else f"only {1 / speed:.2f} times faster"
    why = f"batch {plan.serving.batch}, limited by {plan.serving.limited_by}; bound by {plan.decode.bound}"
    return f"{times:.2f} times the cost a token: {dearer}, {slower} ({why})"


def why_impossible(plan: Plan) -> str:
    """One line on why a plan cannot be served as asked, and the first thing that would help."""
    targets = [i.target for i in plan.impossible]
    reasons = [f"{i.target}: {i.wanted} wanted, best {i.best}" for i in plan.impossible]
    advice = next((i.advice for i in plan.impossible if i.advice), None)
    if advice:
        reasons[-1] += f"; what would help: {advice}"
    m = plan.memory
    if not m.fits and "min_batch" not in targets:
        missing = show_bytes(m.missing_bytes)
        short = f"users: {m.wanted_users:,} of {m.context:,} tokens need {missing} more memory"
        reasons.insert(0, f"{short}, {m.users:,} fit; what would help: {m.fix}")
    return ". ".join(reasons)
