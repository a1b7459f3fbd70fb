"""Page pools of latents and index keys, and the pages that requests hold in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_dsa.config import DSAConfig
from compiled_dsa.custom_ops.layout import FP8, PAGE, index_pool_shape, latent_pool_shape, split_index_pool
from compiled_dsa.pages import PageLedger

_COPIED_AT_ONCE = 256  # pages; bounds the scratch of a move: 19 MB for bf16 latents of 576 elements


@dataclass
class LayerPools:
    """The pools of one layer (byte layouts: custom_ops/layout.py).

    A layer that takes the selection of another has no index keys; the latents of one that attends another layer's are
    that layer's, and not its own.
    """

    latents: Tensor
    index_keys: Tensor | None
    owns_latents: bool = True

    @classmethod
    def allocate(
        cls,
        config: DSAConfig,
        pages: int,
        latent_dtype: torch.dtype,
        index_dtype: torch.dtype,
        device,
        latents: Tensor | None = None,
    ) -> "LayerPools":
        """Zeroed pools of ``pages`` pages; a dtype is a model dtype or ``torch.float8_e4m3fn``.

        Args:
            latents: those of the layer ``kv_source``, for a layer that has one.
        """
        owns_latents = latents is None
        if latents is None:
            shape, dtype = latent_pool_shape(pages, config.kv_lora_rank, config.qk_rope_head_dim, latent_dtype)
            latents = torch.zeros(shape, dtype=dtype, device=device)
        keys = None
        if not config.index_shared:
            shape, dtype = index_pool_shape(pages, config.index_head_dim, index_dtype)
            keys = torch.zeros(shape, dtype=dtype, device=device)
        return cls(latents, keys, owns_latents)

    def tensors(self) -> list[Tensor]:
        """The layer's own pools."""
        latents = [self.latents] if self.owns_latents else []
        return latents if self.index_keys is None else [*latents, self.index_keys]

    def token_tensors(self) -> list[Tensor]:
        """Views [P, 64, ...] that together hold every byte of a token: latents, index keys (fp8: codes and scales)."""
        latents = [self.latents] if self.owns_latents else []
        if self.index_keys is None:
            return latents
        keys, scales = split_index_pool(self.index_keys)
        return [*latents, keys] if scales is None else [*latents, keys.view(torch.uint8), scales]


def check_cache_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises ValueError unless a pool may have this dtype."""
    if not dtype.is_floating_point or (dtype.itemsize == 1 and dtype != FP8):
        raise ValueError(f"{name}={dtype}; it must be a model dtype or torch.float8_e4m3fn")


def supports_fp8(device: torch.device | str) -> bool:
    """True for GPUs whose tensor cores take e4m3 (compute capability 8.9 and later)."""
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


class PagePool(PageLedger):
    """Pools of all layers, a page table shared by them, and the books of pages on the host.

    A loop calls, for each request of a step, ``reserve``; then it makes the ``Batch`` and runs the step; then ``crop``
    takes rejected drafts back. ``fork``, ``keep`` and ``adopt`` share pages between requests, ``free`` ends a request.
    Work on the device goes to the current stream, and no tensor ever gets another address.

    Args:
        configs: one ``DSAConfig`` a layer.
        num_pages: pages of 64 tokens in each pool.
        max_requests: rows of the page table.
        max_len: longest request, in tokens; it sets the width of the page table.
        latent_dtype, index_dtype: a model dtype or ``torch.float8_e4m3fn``.

    Attributes:
        layers: the ``LayerPools`` of each layer.
        page_table: int32 [max_requests, ceil(max_len/64)] on the device; -1 where a request holds no page.
    """

    def __init__(
        self,
        configs: list[DSAConfig],
        *,
        num_pages: int,
        max_requests: int,
        max_len: int,
        latent_dtype: torch.dtype,
        index_dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__(num_pages, max_requests, max_len)
        check_cache_dtype("latent_dtype", latent_dtype)
        check_cache_dtype("index_dtype", index_dtype)
        for i, c in enumerate(configs):
            if c.kv_source is not None and not 0 <= c.kv_source < i:
                raise ValueError(f"configs[{i}].kv_source={c.kv_source}; it must be an earlier layer")
        self.layers: list[LayerPools] = []
        with torch.inference_mode(False):  # tensors made in inference mode could not be changed outside of it
            for c in configs:
                latents = None if c.kv_source is None else self.layers[c.kv_source].latents
                self.layers.append(LayerPools.allocate(c, num_pages, latent_dtype, index_dtype, device, latents))
            self.page_table = torch.full((max_requests, -(-max_len // PAGE)), -1, dtype=torch.int32, device=device)
        for tensor in (self.page_table, *(pool for layer in self.layers for pool in layer.tensors())):
            torch._dynamo.mark_static_address(tensor, guard=False)  # torch's own CUDA graphs do not copy it then
        self.page_bytes = sum(pool[0].nbytes for layer in self.layers for pool in layer.tensors())

    def move_tokens(
        self, requests: int | Sequence[int], from_positions: Sequence[int], to_positions: Sequence[int]
    ) -> None:
        """Moves tokens inside their requests, all at once, as after the verification of a tree of drafts.

        What stood at ``to_positions`` is lost; what stood at ``from_positions`` stays there unless it is overwritten.
        Rope is not applied anew: a draft's position is that of its depth in the tree, wherever it was stored.

        Args:
            requests: the request of all positions, or one request a position.
            from_positions, to_positions: positions below what ``reserve`` was last called with.

        Raises:
            ValueError: lengths differ, no such request or token, a token is overwritten twice, or one is in a page that
                is shared or kept.
        """
        if isinstance(requests, int):
            requests = [requests] * len(from_positions)
        if not len(requests) == len(from_positions) == len(to_positions):
            raise ValueError(
                f"{len(requests)} requests, {len(from_positions)} from_positions and {len(to_positions)} to_positions; "
                "it must be as many"
            )
        sources = [self._place("from_positions", *token) for token in zip(requests, from_positions)]
        targets = [self._place("to_positions", *token) for token in zip(requests, to_positions)]
        if len(set(targets)) < len(targets):
            raise ValueError(f"to_positions={list(to_positions)}; it must not name a token twice")
        for request, position, (page, _) in zip(requests, to_positions, targets):
            if not self._own(page):
                raise ValueError(f"to_positions: token {position} of request {request} is in a page shared or kept")
        if not sources:
            return
        device = self.page_table.device
        (from_page, from_offset), (to_page, to_offset) = torch.tensor([sources, targets], device=device).mT
        for layer in self.layers:
            for tensor in layer.token_tensors():
                tensor[to_page, to_offset] = tensor[from_page, from_offset]

    def reorder(self, sources: Tensor, num_pages: int) -> None:
        """Request b becomes a copy of request ``sources[b]``, in place, for the first ``num_pages`` pages of each.

        Page table and free list stay as they are, so this is what a beam search needs between replays of a graph. What
        a source does not hold is not copied.

        Args:
            sources: integer tensor [n] on the device, n <= max_requests; not read by the host.
            num_pages: at most the pages that each of the requests 0 to n-1 holds.

        Raises:
            ValueError: a request to be overwritten holds fewer pages, or one that is shared or kept; nothing was
                changed.
        """
        n = sources.shape[0]
        for request in range(n):
            pages = self.pages_of(request)[:num_pages]
            if len(pages) < num_pages:
                raise ValueError(f"num_pages={num_pages}; request {request} holds {len(pages)} pages")
            if (self._shared or self._key_of) and not all(map(self._own, pages)):
                raise ValueError(f"num_pages={num_pages}; a page of request {request} is shared or kept")
        to = self.page_table[:n, :num_pages].long()
        source_pages = self.page_table[sources, :num_pages].long()
        source_pages = torch.where(source_pages < 0, to, source_pages)
        # column by column of the page table, which only reads itself: the copy in between stays small
        at_once = max(1, _COPIED_AT_ONCE // max(1, n))
        for target, source in zip(to.split(at_once, 1), source_pages.split(at_once, 1)):
            for layer in self.layers:
                for pool in layer.tensors():
                    pool[target] = pool[source]

    # ---- what a CUDA graph needs to know (graphs/buffers.py: GraphState) -------------------------------------------

    def advanced_tensors(self) -> list[Tensor]:
        """None: lengths are the caller's, and what a step writes it writes again in the same slots when repeated."""
        return []

    def trace_facts(self) -> tuple:
        """None that change."""
        return ()

    def set_trace_facts(self, facts: tuple | None) -> None:
        pass

    def signature(self) -> tuple:
        return tuple((pool.shape, pool.dtype, pool.device) for layer in self.layers for pool in layer.tensors())

    # ---- what the books ask for -------------------------------------------------------------------------------------

    def _copy_pages(self, from_pages: Sequence[int], to_pages: Sequence[int]) -> None:
        places = torch.tensor([from_pages, to_pages], device=self.page_table.device)
        for source, target in places.split(_COPIED_AT_ONCE, 1):
            for layer in self.layers:
                for pool in layer.tensors():
                    pool[target] = pool[source]

    def _publish(self, requests: Sequence[int]) -> None:
        rows = torch.full((len(requests), self.page_table.shape[1]), -1, dtype=torch.int32)
        for row, request in zip(rows, requests):
            pages = self.pages_of(request)
            row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        if len(requests) == 1:  # what a decode step does: one transfer
            self.page_table[requests[0]].copy_(rows[0])
        else:
            device = self.page_table.device
            self.page_table.index_copy_(0, torch.tensor(requests, device=device), rows.to(device))

    def _place(self, name: str, request: int, position: int) -> tuple[int, int]:
        """Page and offset of a token."""
        state = self._checked(request)
        if not 0 <= position < state.tokens:
            raise ValueError(f"{name}: token {position}; request {request} has {state.tokens} tokens")
        return state.pages[position // PAGE], position % PAGE
