"""Copies of pages between two tiers of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.kv import Pool


class Copies:
    """Between pools in one memory: done when `copy` returns."""

    def copy(self, source: Pool, pages: Sequence[int], target: Pool, targets: Sequence[int]) -> None:
        """Copy pages in every layer. Until `wait` none of `pages` may be written, and none of `targets` used."""
        source.copy_to(pages, target, targets)

    def wait(self) -> None:
        """Whatever is read or written from now on comes after the copies so far."""


class StreamCopies(Copies):
    """Between a CUDA device and pinned host memory, on a stream of their own. The caller goes on; the device's current
    stream waits for them in `wait`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None

    def copy(self, source: Pool, pages: Sequence[int], target: Pool, targets: Sequence[int]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            source.copy_to(pages, target, targets)
        self._copied = self._stream.record_event()

    def wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None


def copies_of(pool: Pool) -> Copies:
    """The copies that move pages of this pool to host memory and back."""
    return StreamCopies(pool.device) if pool.device.type == "cuda" else Copies()
