"""Page pools of latents and index keys, and the pages that requests hold in them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_dsa.config import DSAConfig
from compiled_dsa.custom_ops.layout import FP8, PAGE, index_pool_shape, latent_pool_shape


class OutOfPagesError(RuntimeError):
    """The pool has fewer free pages than a request needs; nothing was changed."""


@dataclass
class LayerPools:
    """The pools of one layer (byte layouts: custom_ops/layout.py).

    A layer that takes the selection of another has no index keys.
    """

    latents: Tensor
    index_keys: Tensor | None

    @classmethod
    def allocate(
        cls, config: DSAConfig, pages: int, latent_dtype: torch.dtype, index_dtype: torch.dtype, device
    ) -> "LayerPools":
        """Zeroed pools of ``pages`` pages; a dtype is a model dtype or ``torch.float8_e4m3fn``."""
        shape, dtype = latent_pool_shape(pages, config.kv_lora_rank, config.qk_rope_head_dim, latent_dtype)
        latents = torch.zeros(shape, dtype=dtype, device=device)
        if config.index_shared:
            return cls(latents, None)
        shape, dtype = index_pool_shape(pages, config.index_head_dim, index_dtype)
        return cls(latents, torch.zeros(shape, dtype=dtype, device=device))

    def tensors(self) -> list[Tensor]:
        return [self.latents] if self.index_keys is None else [self.latents, self.index_keys]


def check_cache_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises ValueError unless a pool may have this dtype."""
    if not dtype.is_floating_point or (dtype.itemsize == 1 and dtype != FP8):
        raise ValueError(f"{name}={dtype}; it must be a model dtype or torch.float8_e4m3fn")


def supports_fp8(device: torch.device | str) -> bool:
    """True for GPUs whose tensor cores take e4m3 (compute capability 8.9 and later)."""
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


class PagePool:
    """Pools of all layers, a page table shared by them, and a free list on the host.

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
        for name, value in (("num_pages", num_pages), ("max_requests", max_requests), ("max_len", max_len)):
            if value < 1:
                raise ValueError(f"{name}={value}; it must be at least 1")
        if num_pages * PAGE > torch.iinfo(torch.int32).max:
            raise ValueError(f"num_pages={num_pages}; physical slots are int32, so at most {2**31 // PAGE - 1} pages")
        check_cache_dtype("latent_dtype", latent_dtype)
        check_cache_dtype("index_dtype", index_dtype)
        self.max_len = max_len
        self.layers = [LayerPools.allocate(c, num_pages, latent_dtype, index_dtype, device) for c in configs]
        self.page_table = torch.full((max_requests, -(-max_len // PAGE)), -1, dtype=torch.int32, device=device)
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: list[list[int]] = [[] for _ in range(max_requests)]

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_of(self, request: int) -> tuple[int, ...]:
        """The pages that a request holds, in order."""
        return tuple(self._held[self._checked(request)])

    def reserve(self, request: int, kv_len: int) -> None:
        """Gives ``request`` pages for its first ``kv_len`` tokens; pages that it holds stay.

        Raises:
            ValueError: no such request, or ``kv_len`` outside [0, max_len].
            OutOfPagesError: too few free pages.
        """
        held = self._held[self._checked(request)]
        if not 0 <= kv_len <= self.max_len:
            raise ValueError(f"kv_len={kv_len}; it must be between 0 and max_len={self.max_len}")
        missing = -(-kv_len // PAGE) - len(held)
        if missing > len(self._free):
            raise OutOfPagesError(f"request {request} needs {missing} more pages for {kv_len} tokens; "
                                  f"{len(self._free)} are free")  # fmt: skip
        if missing > 0:
            held.extend(self._free.pop() for _ in range(missing))
            self._publish(request)

    def crop(self, request: int, kv_len: int) -> None:
        """Keeps the pages of the first ``kv_len`` tokens of ``request`` and frees its others."""
        held = self._held[self._checked(request)]
        if not 0 <= kv_len <= self.max_len:
            raise ValueError(f"kv_len={kv_len}; it must be between 0 and max_len={self.max_len}")
        kept = -(-kv_len // PAGE)
        if kept < len(held):
            self._free.extend(reversed(held[kept:]))
            del held[kept:]
            self._publish(request)

    def free(self, request: int) -> None:
        """Takes all pages of ``request`` back."""
        self.crop(request, 0)

    def reorder(self, sources: Tensor, num_pages: int) -> None:
        """Request b becomes a copy of request ``sources[b]``, in place, for the first ``num_pages`` pages of each.

        Addresses, page table and free list stay as they are, so this is what a beam search needs between replays of a
        graph. What a source does not hold is not copied.

        Args:
            sources: integer tensor [n] on the device, n <= max_requests; not read by the host.
            num_pages: at most the pages that each of the requests 0 to n-1 holds.

        Raises:
            ValueError: a request to be overwritten holds fewer pages; nothing was changed.
        """
        n = sources.shape[0]
        for request in range(n):
            if len(self.pages_of(request)) < num_pages:
                raise ValueError(f"num_pages={num_pages}; request {request} holds {len(self.pages_of(request))} pages")
        to = self.page_table[:n, :num_pages].long()
        source_pages = self.page_table[sources, :num_pages].long()
        source_pages = torch.where(source_pages < 0, to, source_pages)
        for layer in self.layers:
            for pool in layer.tensors():
                pool[to] = pool[source_pages]

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

    def _checked(self, request: int) -> int:
        if not 0 <= request < len(self._held):
            raise ValueError(f"request={request}; the pool has requests 0 to {len(self._held) - 1}")
        return request

    def _publish(self, request: int) -> None:
        row = torch.full((self.page_table.shape[1],), -1, dtype=torch.int32)
        row[: len(self._held[request])] = torch.tensor(self._held[request], dtype=torch.int32)
        self.page_table[request].copy_(row)
