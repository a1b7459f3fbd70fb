"""Page pools made on the spot from transformers' own caches, or from nothing but the step's tokens.

transformers' Dynamic and Static caches hold latents as dense [B, 1, C, .] tensors (C columns, padding included). For
one layer of one step they are laid out as pages: padding columns are sorted to the end of their row, so that what a
query may see is a prefix, and the ops run as on a PagedCache. That is one copy of the latents a step, where the stock
attention expands keys and values for all heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_dsa.batch import Batch
from compiled_dsa.custom_ops.layout import PAGE


@dataclass
class Columns:
    """How the columns of a stock cache map to pages, for one step.

    Attributes:
        first: column of the step's first token, an int or a 0-d tensor.
        order: int64 [B, C], the column at each compacted place, or None when no column is padding.
    """

    batch: Batch
    first: int | Tensor
    order: Tensor | None
    count: int  # C

    @classmethod
    def of_step(
        cls, columns_real: Tensor | None, first, B: int, S: int, count: int, index_topk: int, device
    ) -> "Columns":
        """Args: columns_real: bool [B, C] or None; first: see above; count: C; B, S: size of the step."""
        pages = -(-count // PAGE)
        page_table = torch.arange(B * pages, device=device, dtype=torch.int32).view(B, pages)
        columns = torch.arange(count, device=device)
        if columns_real is None:
            real, order = None, None
            past = torch.zeros(B, dtype=torch.int64, device=device) + first
        else:
            real = columns_real[:, torch.arange(S, device=device) + first]
            order = torch.argsort(~columns_real, dim=1, stable=True)
            past = (columns_real & (columns < first)).sum(1)
        batch = Batch.from_grid(real, past, page_table, S, skip_scores=count <= index_topk)
        return cls(batch, first, order, count)

    def pool(self, *parts: Tensor) -> Tensor:
        """A page pool [B * pages, 64, sum of widths] of dense tensors [B, C, width]."""
        dense = torch.cat(parts, dim=-1)  # [B, C, width]
        if self.order is not None:
            dense = dense.gather(1, self.order.unsqueeze(-1).expand(-1, -1, dense.shape[-1]))
        padded = torch.nn.functional.pad(dense, (0, 0, 0, -self.count % PAGE))
        return padded.reshape(-1, PAGE, dense.shape[-1])

    def to_hf(self, topk: Tensor | None, S: int) -> Tensor:
        """A selection of slots [B*S, K] as transformers' [B, S, K] of columns.

        transformers has no -1: lanes without a key repeat the query's own column, which it sees anyway.
        """
        B, device = self.batch.page_table.shape[0], self.batch.page_table.device
        if topk is None:
            return torch.arange(self.count, device=device, dtype=torch.int32).expand(B, S, self.count)
        topk = topk.view(B, S, -1)
        first_slot = self._first_slots(B, device)
        places = (topk - first_slot).clamp(min=0).long()
        columns = places if self.order is None else self._gather(self.order, places)
        own = (torch.arange(S, device=device) + self.first).view(1, S, 1)
        return torch.where(topk >= 0, columns, own).int()

    def from_hf(self, columns: Tensor) -> Tensor:
        """The inverse of ``to_hf``: slots [B*S, K]; lanes past what a row sees are ignored by their count."""
        B = columns.shape[0]
        places = columns.long()
        if self.order is not None:
            places = self._gather(self.order.argsort(dim=1), places)
        return (places + self._first_slots(B, columns.device)).int().flatten(0, 1)

    def _first_slots(self, B: int, device) -> Tensor:
        width = self.batch.page_table.shape[1] * PAGE
        return (torch.arange(B, device=device) * width).view(B, 1, 1)

    @staticmethod
    def _gather(table: Tensor, places: Tensor) -> Tensor:
        B, S, K = places.shape
        return table.gather(1, places.reshape(B, S * K)).view(B, S, K)
