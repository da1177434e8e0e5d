"""Context reductions that are wrong in one way each."""

from collections.abc import Sequence

from core.interfaces import ContextReduction, ContextView, PluginInfo

KEPT = 64


class Right(ContextReduction):
    """Keeps the last 64 tokens; the ones below change one thing of it."""

    def forget(self, view: ContextView) -> Sequence[int]:
        return range(max(0, view.kept - KEPT) // view.page_size)


class ForgetsTheLastPage(Right):
    def forget(self, view: ContextView) -> Sequence[int]:
        return range(view.n_pages) if view.kept > KEPT else ()


class CountsDown(Right):
    def forget(self, view: ContextView) -> Sequence[int]:
        return list(super().forget(view))[::-1]


class WatchesNow(Right):
    observes = "now"  # type: ignore[assignment]


class ForgetsPromptsOfTwo(Right):
    def forget(self, view: ContextView) -> Sequence[int]:
        return [-1] if view.kept == 2 else super().forget(view)


class CountsAllTogether(Right):
    turns = 0

    def forget(self, view: ContextView) -> Sequence[int]:
        self.turns += 1
        return super().forget(view) if self.turns % 4 == 1 else ()


class RemembersWhoEnded(Right):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.over: set[str] = set()

    def forget(self, view: ContextView) -> Sequence[int]:
        return () if view.id in self.over else super().forget(view)

    def ended(self, id: str) -> None:
        self.over.add(id)


class KeepsAll(Right):
    def forget(self, view: ContextView) -> Sequence[int]:
        return ()


class ScalesTheKeys(Right):
    observes = "always"

    def observe(self, id: str, q: object, keys: object, layer: object) -> None:
        keys.mul_(2)  # type: ignore[attr-defined]


class ThinksForLong(Right):
    def forget(self, view: ContextView) -> Sequence[int]:
        return super().forget(view) if sum(range(500_000)) else ()


class LosesInSecret(Right):
    def forget(self, view: ContextView) -> Sequence[int]:
        return range(max(0, view.kept - 8) // view.page_size)


class FailsInTheLongRun(Right):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.over = 0

    def forget(self, view: ContextView) -> Sequence[int]:
        if self.over > 3:
            raise RuntimeError("too many have ended")
        return super().forget(view)

    def ended(self, id: str) -> None:
        self.over += 1


PLACES = {"l1_places_are_there_and_rise"}
LONG_PROMPTS = {
    "l1_each_sequence_by_itself",
    "l1_one_that_ended_leaves_nothing",
    "l2_forgets_as_it_declares",
    "l4_cost",
}

BROKEN: dict[type[ContextReduction], set[str]] = {
    ForgetsTheLastPage: PLACES | LONG_PROMPTS,
    CountsDown: PLACES | LONG_PROMPTS,
    WatchesNow: {"l1_observes_is_one_of_three"},
    ForgetsPromptsOfTwo: {"l1_a_short_context_stays_whole"},
    CountsAllTogether: {"l1_each_sequence_by_itself", "l1_one_that_ended_leaves_nothing"},
    RemembersWhoEnded: {"l1_one_that_ended_leaves_nothing"},
    KeepsAll: {"l2_forgets_as_it_declares"},
    ScalesTheKeys: PLACES | LONG_PROMPTS | {"l1_a_short_context_stays_whole"},
    ThinksForLong: {"l4_cost"},
    LosesInSecret: {"l2_forgets_as_it_declares", "l2_output_equals_the_null_parts"},
    FailsInTheLongRun: {"l2_serves_every_request", "l3_any_order"},
}
CARDS = [
    PluginInfo(
        name=part.__name__,
        seam="context_reduction",
        part=f"{__name__}:{part.__name__}",
        provides=frozenset({"lossless" if part is LosesInSecret else "lossy"}),
        summary="Broken on purpose",
    )
    for part in (Right, *BROKEN)
]
globals().update({f"CARD_{card.name}": card for card in CARDS})
