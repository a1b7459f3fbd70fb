"""Random inputs of a layer: weights, hidden states, and caches whose content before rounding is known.

Legend: T rows, L latent dim, R rope dim, D index head dim, P pages.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compiled_dsa.attention import SparseAttention
from compiled_dsa.batch import DECODE, Batch
from compiled_dsa.benchmark.cases import BenchCase
from compiled_dsa.benchmark.timing import Run
from compiled_dsa.cache import LayerPools, PagePool
from compiled_dsa.config import DSAConfig
from compiled_dsa.custom_ops.layout import FP8, PAGE, logical_slots
from compiled_dsa.custom_ops.store_index_keys import store_index_keys
from compiled_dsa.custom_ops.store_latents import store_latents

_PAGES_AT_ONCE = 4096  # while caches are filled
ROPE_THETA = 1e4


def random_layer(config: DSAConfig, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> SparseAttention:
    """A layer of random matrices of standard deviation 0.02 and norms of weight 1."""
    layer = SparseAttention(config, device=device, dtype=dtype).eval()
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter.data, std=0.02, generator=generator)
    return layer


def angles(positions: Tensor, R: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R/2] of positions [T]."""
    inverse = ROPE_THETA ** -(torch.arange(0, R, 2, dtype=torch.float64, device=positions.device) / R)
    angle = positions[:, None].double() * inverse
    return angle.cos().to(dtype), angle.sin().to(dtype)


@dataclass
class LayerInputs:
    """One step of one layer.

    Attributes:
        x: [T, hidden]; cos, sin: [T, R/2].
        batch: its page table has just the columns that the context needs.
    """

    x: Tensor
    cos: Tensor
    sin: Tensor
    batch: Batch
    caches: "Caches"

    @property
    def pools(self) -> LayerPools:
        return self.caches.pool.layers[0]

    def slots_of(self, request: int) -> Tensor:
        """int64 [kv_len]: slots of all tokens of a request, in order."""
        positions = torch.arange(int(self.batch.kv_len[request]), device=self.x.device)
        return logical_slots(self.batch.page_table, torch.full_like(positions, request), positions)


@dataclass
class Runnable:
    """One implementation with one step's inputs.

    Attributes:
        run: what is timed.
        result: runs it once: (output [T, hidden], slots int [T, K] that were attended).
        step: run with what comes around it in every step, whose host time is measured; None: there is nothing.
    """

    run: Run
    result: Callable[[], tuple[Tensor, Tensor]]
    step: Run | None = None


class Caches:
    """fp8 pools of one layer full of random tokens, and these before they were rounded to fp8.

    Attributes:
        pool: the pools.
        latents: [P, 64, L + R] in the model's dtype: latents, then rope values with pairs in place.
        keys: [P, 64, D], likewise.
    """

    def __init__(
        self, config: DSAConfig, tokens: int, device: str, dtype: torch.dtype = torch.bfloat16, latent_dtype=FP8, seed=1
    ):
        pages = -(-tokens // PAGE)
        self.config = config
        self.pool = PagePool(
            [config],
            num_pages=pages,
            max_requests=1,
            max_len=tokens,
            latent_dtype=latent_dtype,
            index_dtype=latent_dtype,
            device=device,
        )
        L, R, D = config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim
        self.latents = torch.empty(pages, PAGE, L + R, dtype=dtype, device=device)
        self.keys = torch.empty(pages, PAGE, D, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(seed)
        for start in range(0, pages, _PAGES_AT_ONCE):
            part = slice(start, min(start + _PAGES_AT_ONCE, pages))
            for tensor in (self.latents[part], self.keys[part]):
                tensor.normal_(generator=generator)
            self.restore(torch.arange(part.start * PAGE, part.stop * PAGE, device=device))

    def restore(self, slots: Tensor) -> None:
        """Writes the tokens at ``slots`` int64 [n] into the pools again, after a step wrote its own there."""
        pools, L = self.pool.layers[0], self.config.kv_lora_rank
        latents, keys = self.latents.flatten(0, 1)[slots], self.keys.flatten(0, 1)[slots]
        store_latents(pools.latents, latents[:, :L].contiguous(), latents[:, L:].contiguous(), slots)
        store_index_keys(pools.index_keys, keys, slots, self.config.index_format.scale_ue8m0)

    def inputs(self, case: BenchCase, seed: int = 2) -> LayerInputs:
        """Inputs of a case over pages in random order.

        Raises:
            ValueError: the context is no multiple of 64, or the pools are too small.
        """
        if case.context % PAGE:
            raise ValueError(f"context={case.context}; it must be a multiple of {PAGE}")
        columns, device = case.context // PAGE, self.keys.device
        if case.batch * columns > self.pool.num_pages:
            raise ValueError(f"{case.name} needs {case.batch * columns} pages; the pools have {self.pool.num_pages}")
        generator = torch.Generator(device).manual_seed(seed)
        order = torch.randperm(self.pool.num_pages, device=device, generator=generator)
        page_table = order[: case.batch * columns].view(case.batch, columns).int()
        kv_len = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
        if case.kind == DECODE:
            batch = Batch.decode(kv_len, page_table)
        else:
            batch = Batch.from_lengths(torch.full_like(kv_len, case.rows), kv_len, page_table, case.rows)
        x = torch.randn(case.tokens, self.config.hidden_size, device=device, generator=generator).to(self.keys.dtype)
        cos, sin = angles(batch.positions, self.config.qk_rope_head_dim, x.dtype)
        return LayerInputs(x, cos, sin, batch, self)
