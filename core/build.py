"""From a recipe to an engine: resolve the parts, list what cannot work, load the model, put it together."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

import torch

from core.clock import Clock
from core.engine import Engine, Limits
from core.heads import checked_groups, slices
from core.hooks import OBSERVER_GROUP, Observers
from core.interfaces.plugin import BuildContext, CacheContext, PoolContext
from core.kv import Pool, page_bytes, pool_sizes, shared_bytes
from core.memory import Memory
from core.names import near
from core.pages import Pages
from core.prefixes import Sharing
from core.recipe import Chosen, Recipe, RecipeError, check, incompatibilities, kv_bytes, resolve, settle
from core.registry import Registry
from core.runner import Model, Runner
from core.tier import HostTier
from core.twins import TWINS
from core.types import Budget, KVGroup, PartwiseError

if TYPE_CHECKING:
    from core.models.loaded import OpenedModel

log = logging.getLogger("partwise")

DEFAULT_MAX_MODEL_LEN = 8192


class LoadedModel(Model, Protocol):
    """What the engine needs of a model, wherever it comes from."""

    @property
    def groups(self) -> Sequence[KVGroup]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer_vocab(self) -> int | None: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def eos_token_ids(self) -> Iterable[int]: ...


def build_engine(recipe: Recipe | Mapping[str, Any], observers: Iterable[object] = ()) -> Engine:
    """Load the recipe's model and build its engine, watched by `observers` and by those that the recipe names.
    RecipeError lists every reason why that cannot work, before any weight is loaded."""
    from core.models.loading import load_model

    recipe = recipe if isinstance(recipe, Recipe) else Recipe.model_validate(recipe)
    watching = _observers(recipe, observers)
    registry, chosen, opened, context, replaced = _opened(recipe)
    for sentence in replaced:
        log.warning("%s", sentence)
    check(incompatibilities(chosen, registry, context, opened.needs, opened.gives), recipe)
    torch.set_num_threads(context.threads)
    dtype = getattr(torch, recipe.engine.dtype)

    def fits(groups: Sequence[KVGroup]) -> None:
        _sizes(recipe, chosen, registry, groups, dtype, context)

    structure = _build(registry, chosen["attention.structure"], context)
    weights = _build(registry, chosen["quantizer.weights"], context)
    model = load_model(
        opened,
        structure=structure,
        weights=weights,
        dtype=dtype,
        max_model_len=context.max_model_len,
        check=fits,
    )
    return assemble(recipe, chosen, registry, model, watching)


def reasons(recipe: Recipe) -> list[str]:
    """Everything that is known, without loading a weight, to keep a recipe from working; empty when nothing is."""
    try:
        _observers(recipe)
        registry, chosen, opened, context, _ = _opened(recipe)
        return incompatibilities(chosen, registry, context, opened.needs, opened.gives)
    except PartwiseError as error:
        return [line.removeprefix("  - ") for line in str(error).splitlines()]


def _opened(recipe: Recipe) -> tuple[Registry, dict[str, Chosen], OpenedModel, BuildContext, list[str]]:
    """A recipe's parts beside the description of its model; last, what stands in for parts that are unfit here."""
    from core.models.loading import open_model

    registry = recipe.registry()
    chosen = resolve(recipe, registry)
    opened = open_model(recipe.model)
    context = _context(recipe, chosen, opened.max_positions, opened.vocab_size)
    chosen, replaced = settle(recipe, chosen, registry, context)
    return registry, chosen, opened, context, replaced


def assemble(
    recipe: Recipe,
    chosen: Mapping[str, Chosen],
    registry: Registry,
    model: LoadedModel,
    observers: Observers | None = None,
) -> Engine:
    """An engine over a loaded model. `observers`: None takes those that the recipe names."""
    clock, observers = Clock(), observers or _observers(recipe)
    vocab_size = min(model.vocab_size, model.tokenizer_vocab or model.vocab_size)  # a head may have spare rows
    context = _context(recipe, chosen, model.max_positions, vocab_size)
    pages = _pools(recipe, chosen, registry, model, context, clock)
    context = replace(context, page_bytes=pages[0].allocator.page_bytes)
    eviction = _build(registry, chosen["prefix_cache.eviction"], context)
    cache_context = CacheContext(**{**vars(context), "eviction": eviction})
    drafter = _build(registry, chosen["drafter"], context)
    draft_k = getattr(chosen["drafter"].options, "k", 0)
    memory = Memory(
        pages,
        _build(registry, chosen["prefix_cache"], cache_context),
        cache_label=_label(chosen["prefix_cache"]),
        sharing=_sharing(chosen["prefix_cache"]),
        step_tokens=context.token_budget,
        decode_tokens=1 + draft_k,
        clock=clock,
        on_evicted=lambda n: observers.call("on_evicted", pages=n),
        tier=_tier(pages, model.dtype, clock),
    )
    kernel = _build(registry, chosen["attention.kernel"], context)
    reduction = _build(registry, chosen["context_reduction"], context)
    engine = Engine(
        runner=Runner(
            model,
            kernel,
            slices(model.layers, [each.pool for each in pages]),
            context.page_size,
            len(pages),
            clock,
            reduction,
        ),
        memory=memory,
        scheduler=_build(registry, chosen["scheduler"], context),
        drafter=drafter,
        reduction=reduction,
        limits=Limits(
            max_model_len=context.max_model_len,
            max_waiting=recipe.engine.max_waiting,
            budget=Budget(context.token_budget, context.max_running),
            draft_k=draft_k,
            vocab_size=vocab_size,
            eos_token_ids=frozenset(model.eos_token_ids),
            swap=getattr(chosen["scheduler"].options, "preemption", "swap") == "swap",
        ),
        parts={seam: part.info.name for seam, part in chosen.items()},
        labels={seam: _label(part) for seam, part in chosen.items()},
        observers=observers,
        clock=clock,
        needs_hidden="hidden_states" in chosen["drafter"].info.requires,
        seed=recipe.engine.seed,
    )
    for part in chosen.values():
        observers.call(
            "on_plugin_loaded",
            seam=part.seam,
            name=part.info.name,
            distribution=part.distribution,
            version=part.version,
        )
    return engine


def _context(recipe: Recipe, chosen: Mapping[str, Chosen], max_positions: int, vocab_size: int) -> BuildContext:
    asked = recipe.engine.max_model_len
    if asked is not None and asked > max_positions:
        raise RecipeError(
            f"engine.max_model_len is {asked}, but the model has {max_positions} positions; ask for fewer"
        )
    scheduler: Any = chosen["scheduler"].options
    allocator: Any = chosen["kv_allocator"].options
    return BuildContext(
        page_size=allocator.page_size,
        max_model_len=asked or min(max_positions, DEFAULT_MAX_MODEL_LEN),
        max_running=scheduler.max_running,
        token_budget=scheduler.token_budget,
        vocab_size=vocab_size,
        threads=_threads(recipe),
        dtype=recipe.engine.dtype,
    )


def _pools(
    recipe: Recipe,
    chosen: Mapping[str, Chosen],
    registry: Registry,
    model: LoadedModel,
    context: BuildContext,
    clock: Clock,
) -> list[Pages]:
    quantizer, part = _build(registry, chosen["quantizer.kv"], context), chosen["kv_allocator"]
    pages = []
    sizes = _sizes(recipe, chosen, registry, model.groups, model.dtype, context)
    for index, (group, size, n_pages) in enumerate(sizes):
        pool = Pool(group, index, n_pages, context.page_size, quantizer, model.dtype)
        pool_context = PoolContext(**{**vars(context), "page_bytes": size, "n_pages": n_pages, "group": group})
        allocator = _build(registry, part, pool_context)
        pages.append(Pages(allocator, pool, _label(part), clock))
    return pages


def _sizes(
    recipe: Recipe,
    chosen: Mapping[str, Chosen],
    registry: Registry,
    model_groups: Sequence[KVGroup],
    dtype: torch.dtype,
    context: BuildContext,
) -> list[tuple[KVGroup, int, int]]:
    """The groups as the allocator makes them, each with the bytes and the number of its pages. RecipeError: there is
    no room for a page."""
    given = kv_bytes(recipe)
    quantizer, part = _build(registry, chosen["quantizer.kv"], context), chosen["kv_allocator"]
    allocator: Any = registry.load(part.seam, part.info.name)
    groups = checked_groups(allocator.regroup(tuple(model_groups)), model_groups, _label(part))
    formats = [quantizer.format(group, context.page_size, dtype) for group in groups]
    sizes = [page_bytes(group, format, context.page_size) for group, format in zip(groups, formats, strict=True)]
    fixed = sum(shared_bytes(group, format) for group, format in zip(groups, formats, strict=True))
    counts = pool_sizes(groups, sizes, context.page_size, given - fixed, context.token_budget, context.max_running)
    if min(counts) < 1:
        raise RecipeError(
            f"memory.kv_bytes is {given:,} bytes, but a page of {context.page_size} tokens takes {sum(sizes):,}"
            f"{f' beside {fixed:,} for all pages together' if fixed else ''}; "
            "give it more, or make kv_allocator.page_size smaller"
        )
    return list(zip(groups, sizes, counts, strict=True))


def _tier(device: list[Pages], dtype: torch.dtype, clock: Clock) -> HostTier | None:
    """The host pools behind the device's, of the same groups and formats."""
    host = []
    for index, pages in enumerate(device):
        allocator, pool = pages.allocator.host, pages.pool
        if allocator is None:
            return None
        pinned = pool.device.type == "cuda"
        behind = Pool(pool.group, index, allocator.n_pages, pool.page_size, pool.quantizer, dtype, pinned=pinned)
        host.append(Pages(allocator, behind, pages.label, clock))
    return HostTier(device, host)


def _observers(recipe: Recipe, others: Iterable[object] = ()) -> Observers:
    observers = Observers()
    for other in others:
        observers.register(other)
    points = {point.name: point for point in entry_points(group=OBSERVER_GROUP)}
    for name in recipe.observers:
        if name not in points:
            raise RecipeError(f"there is no observer named {name!r}{near(name, list(points))}")
        try:
            found = points[name].load()
            observers.register(found() if isinstance(found, type) else found, name)
        except Exception as error:
            raise RecipeError(f"observer {name!r} does not load: {type(error).__name__}: {error}") from error
    return observers


def _build(registry: Registry, part: Chosen, context: BuildContext) -> Any:
    built = registry.build(part.seam, part.info.name, part.options, context)
    return TWINS[part.seam](built) if part.books_only else built


def _sharing(cache: Chosen) -> Sharing:
    if cache.books_only or "keeps_nothing" in cache.info.provides:
        return "never"
    return "whole" if "whole_prompts_only" in cache.info.provides else "prefix"


def _label(part: Chosen) -> str:
    return f"{part.seam} {part.info.name!r} of {part.distribution} {part.version}"


def _threads(recipe: Recipe) -> int:
    if recipe.engine.threads:
        return recipe.engine.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
