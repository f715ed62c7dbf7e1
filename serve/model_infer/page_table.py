"""Which device pages each batch row holds, for one state group: by place, or the one working page."""

import numpy as np
import torch

from serve.model_infer.errors import PlanError


class PageTable:
    """Device page ids by row: int32 [max_rows, max_pages] on the CPU, of which a step takes its rows.

    The router decides every id; the table only keeps them in order and refuses what cannot be right.
    page_tokens: tokens that one page holds. num_pages: pages in the pool; ids are below it.
    """

    def __init__(self, group: str, page_tokens: int, num_pages: int, max_rows: int, max_pages: int) -> None:
        self.group = group
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self.counts = np.zeros(max_rows, dtype=np.int64)
        self._ids = torch.zeros((max_rows, max(1, max_pages)), dtype=torch.int32)
        self._view: np.ndarray = self._ids.numpy()
        self._version = 0
        self._gathered: tuple[int, int, torch.Tensor, torch.Tensor] | None = None

    @property
    def max_pages(self) -> int:
        """Pages that a row can hold before the table grows."""
        return self._ids.shape[1]

    def clear(self, row: int) -> None:
        """The row holds no page any more."""
        self.counts[row] = 0
        self._version += 1

    def begin(self, row: int, first_place: int) -> None:
        """The row's first page will be at `first_place`: places before it lie outside of its window and stay unused."""
        if first_place < 0:
            raise PlanError(f"row {row}: first place {first_place} of group {self.group!r}")
        if first_place > self.max_pages:
            self._grow(first_place)
        self._view[row, :first_place] = 0
        self.counts[row] = first_place
        self._version += 1

    def append(self, row: int, pages: list[int]) -> None:
        """Add `pages` behind the row's last one; raises PlanError for ids outside of the pool."""
        if not pages:
            return
        if min(pages) < 0 or max(pages) >= self.num_pages:
            raise PlanError(f"row {row}: page ids {pages} of group {self.group!r} are not in [0, {self.num_pages})")
        first = int(self.counts[row])
        last = first + len(pages)
        if last > self.max_pages:
            self._grow(last)
        self._view[row, first:last] = pages
        self.counts[row] = last
        self._version += 1

    def pages(self, row: int) -> list[int]:
        """The row's page ids in order."""
        ids: list[int] = self._view[row, : self.counts[row]].tolist()
        return ids

    def require(self, rows: np.ndarray, context_lens: np.ndarray) -> None:
        """Raise PlanError unless the pages of rows [B] hold context_lens [B] tokens."""
        enough = self.counts[rows] * self.page_tokens >= context_lens
        if not enough.all():
            bad = int(np.argmin(enough))
            raise PlanError(
                f"row {rows[bad]}: {self.counts[rows[bad]]} pages of group {self.group!r} cannot hold "
                f"{context_lens[bad]} tokens"
            )

    def gather(self, rows: torch.Tensor, max_context_len: int) -> torch.Tensor:
        """int32 [B, columns] of the rows int64 [B]; enough columns for `max_context_len` tokens.

        A step that changes neither rows nor pages gets the tensor of the step before.
        """
        columns = min(-(-max_context_len // self.page_tokens), self.max_pages)
        last = self._gathered
        if last is not None and last[0] == self._version and last[1] == columns and last[2] is rows:
            return last[3]
        table = self._ids[:, :columns].index_select(0, rows)
        self._gathered = (self._version, columns, rows, table)
        return table

    def _grow(self, needed: int) -> None:
        wider = torch.zeros((self._ids.shape[0], max(needed, 2 * self.max_pages)), dtype=torch.int32)
        wider[:, : self.max_pages] = self._ids
        self._ids = wider
        self._view = wider.numpy()


class WorkingPages:
    """The working page of each row, for a group of checkpoints. num_pages: pages in the pool; ids are below it."""

    def __init__(self, group: str, page_tokens: int, num_pages: int, max_rows: int) -> None:
        self.group = group
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self._ids = torch.zeros(max_rows, dtype=torch.int64)
        self._held = np.zeros(max_rows, dtype=bool)
        self._version = 0
        self._gathered: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def clear(self, row: int) -> None:
        """The row holds no page any more."""
        self._held[row] = False
        self._version += 1

    def assign(self, row: int, pages: list[int]) -> None:
        """Give the row its page; raises PlanError unless it is one page of the pool that no other row works in."""
        if len(pages) != 1 or not 0 <= pages[0] < self.num_pages:
            raise PlanError(
                f"row {row}: not one working page of group {self.group!r} in [0, {self.num_pages}): {pages}"
            )
        others = np.flatnonzero(self._held & (self._ids.numpy() == pages[0]))
        if len(others):
            raise PlanError(f"row {row}: page {pages[0]} of group {self.group!r} is row {others[0]}'s working page")
        self._ids[row] = pages[0]
        self._held[row] = True
        self._version += 1

    def page(self, row: int) -> int:
        """The row's working page; raises PlanError without one."""
        if not self._held[row]:
            raise PlanError(f"row {row} has no working page of group {self.group!r}")
        return int(self._ids[row])

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """int64 [B] of the rows int64 [B], which all have one; the tensor of the step before where that had the
        same."""
        last = self._gathered
        if last is not None and last[0] == self._version and last[1] is rows:
            return last[2]
        missing = np.flatnonzero(~self._held[rows.numpy()])
        if len(missing):
            raise PlanError(f"row {int(rows[missing[0]])} has no working page of group {self.group!r}")
        pages = self._ids.index_select(0, rows)
        self._gathered = (self._version, rows, pages)
        return pages

    @property
    def is_held(self) -> np.ndarray:
        """bool [max_rows]: rows that have a working page."""
        return self._held
