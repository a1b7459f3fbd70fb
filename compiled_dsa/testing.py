"""What tests of ops share: random pools and page tables, oracles in fp64, and error bounds that follow from dtypes.

Legend: P pages, T rows, B requests, W columns of a page table, L latent dim, R rope dim, D index head dim.
"""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compiled_dsa.custom_ops import sparse_mla as sparse_mla_op
from compiled_dsa.custom_ops.index_topk import scores_of_rows
from compiled_dsa.custom_ops.layout import (
    LATENT_GROUP,
    PAGE,
    index_pool_shape,
    latent_pool_shape,
    logical_slots,
    split_index_pool,
    split_latent_pool,
)

# Hopper's fp8 tensor cores align the products of a step and drop what lies about 14 bits below the largest one.
FP8_DOT_ERROR = 2.0**-10


def poisoned(*shape: int, dtype: torch.dtype, device) -> Tensor:
    """Fresh memory as it may be: NaN, or for integers a number that no op writes."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else 123456789, dtype=dtype, device=device)


def random_latent_pool(pages: int, L: int, R: int, dtype: torch.dtype, device="cpu", power_of_two=True) -> Tensor:
    """Latents and rope of about unit size; an fp8 pool has a different scale for each token and group."""
    shape, storage = latent_pool_shape(pages, L, R, dtype)
    pool = torch.zeros(shape, dtype=storage, device=device)
    latents, scales, rope = split_latent_pool(pool, L, R)
    values = torch.randn(latents.shape, device=device)
    if scales is not None:
        exponents = torch.rand(scales.shape, device=device) * 4 - 6
        scales.copy_((exponents.floor() if power_of_two else exponents).exp2())
        values = values / expand_groups(scales, L)
    latents.view(torch.uint8).copy_(values.to(latents.dtype).view(torch.uint8))
    rope.copy_(torch.randn(rope.shape, device=device))
    return pool


def random_index_pool(pages: int, D: int, dtype: torch.dtype, device="cpu") -> Tensor:
    """Index keys of about unit size; an fp8 pool has a different scale for each token."""
    shape, storage = index_pool_shape(pages, D, dtype)
    pool = torch.zeros(shape, dtype=storage, device=device)
    keys, scales = split_index_pool(pool)
    values = torch.randn(keys.shape, device=device)
    if scales is not None:
        scales.copy_(torch.rand(scales.shape, device=device) * 0.02 + 0.002)
        values = values / scales[..., None]
    keys.view(torch.uint8).copy_(values.clamp(-448, 448).to(keys.dtype).view(torch.uint8))
    return pool


def random_page_table(requests: int, columns: int, pages: int, device="cpu") -> Tensor:
    """int32 [B, W]: every request has pages of its own, in no order."""
    return torch.randperm(pages, device=device)[: requests * columns].view(requests, columns).int()


def expand_groups(scales: Tensor, L: int) -> Tensor:
    """[..., G] -> [..., L]: the scale of each latent element."""
    return scales.repeat_interleave(LATENT_GROUP, dim=-1)[..., :L]


def dequantised_latents(pool: Tensor, L: int, R: int) -> Tensor:
    """fp64 [P, 64, L + R]: a latent pool of any format, as a model-dtype pool."""
    latents, scales, rope = split_latent_pool(pool, L, R)
    latents = latents.double()
    if scales is not None:
        latents = latents * expand_groups(scales, L).double()
    return torch.cat([latents, rope.double()], dim=-1)


def dequantised_keys(pool: Tensor) -> Tensor:
    """fp64 [P, 64, D]: an index-key pool of any format, as a model-dtype pool."""
    keys, scales = split_index_pool(pool)
    return keys.double() if scales is None else keys.double() * scales[..., None].double()


def attention_oracle(
    q_latent, q_rope, pool, topk, count, page_table, req_of_row, scale: float, sinks
) -> tuple[Tensor, Tensor]:
    """(out [T, H, L], lse [T, H]) of the reference in fp64."""
    L, R = q_latent.shape[2], q_rope.shape[2]
    slots = sparse_mla_op.selected_slots(topk, count, page_table, req_of_row, pool.shape[0])
    return sparse_mla_op.attend(
        q_latent.double(), q_rope.double(), dequantised_latents(pool, L, R), slots, scale, sinks
    )


def attention_tolerance(q_latent, q_rope, pool, scale: float, rounded_query=False) -> tuple[float, float]:
    """Absolute bounds for (out, lse) of attention in the dtype of the query.

    A score is an fp32 sum whose roundings add up like a random walk; dequantised latents of an fp8 pool are rounded to
    the dtype of the query, and so is the query if it was computed. Then the weights are rounded, and the output.
    """
    L, R = q_latent.shape[2], q_rope.shape[2]
    keys = dequantised_latents(pool, L, R).nan_to_num(0.0)
    q = torch.cat([q_latent, q_rope], dim=-1).double()
    largest_score = scale * float(q.norm(dim=-1).amax() * keys.norm(dim=-1).amax())
    eps = torch.finfo(q_latent.dtype).eps
    rounding = eps * (pool.dtype == torch.uint8) + eps * rounded_query
    of_score = largest_score * (4 * (L + R) ** 0.5 * 2.0**-24 + rounding)
    return float(keys[..., :L].abs().amax()) * (2 * of_score + 2 * eps), of_score + 2.0**-18


def index_scores_oracle(q, weights, pool, page_table, req_of_row, visible) -> tuple[Tensor, Tensor, Tensor]:
    """By logical position, all [T, 64 W]: fp64 scores (NaN outside a row's window and on bad pages), bounds on the
    error of a score, and physical slots (-1 where there is none)."""
    T, HI, D = q.shape
    n = page_table.shape[1] * PAGE
    keys = dequantised_keys(pool).flatten(0, 1)
    positions = torch.arange(n, device=q.device)
    slots = logical_slots(page_table, req_of_row.long()[:, None], positions[None], pool.shape[0])
    scores = torch.full((T, n), torch.nan, dtype=torch.float64, device=q.device)
    sizes = scores.clone()
    q, weights = q.double(), weights.double()
    for request in req_of_row.unique().tolist():
        rows = (req_of_row == request).nonzero().flatten()
        request_keys = keys[slots[rows[0]].clamp(min=0)]
        scores[rows] = scores_of_rows(q[rows], weights[rows], request_keys, None)
        sizes[rows] = scores_of_rows(q[rows].abs(), weights[rows].abs(), request_keys.abs(), None)
    outside = (positions >= visible[:, None]) | (slots < 0)
    unit = (D + HI) * 2.0**-24
    if pool.dtype == torch.uint8 and q.device.type == "cuda":
        unit += FP8_DOT_ERROR
    return scores.masked_fill(outside, torch.nan), sizes * unit, slots


def check_topk(chosen: Tensor, visible: Tensor, scores: Tensor, bounds: Tensor, slots: Tensor) -> None:
    """Asserts that ``chosen`` [T, K] is a right choice given the oracle's scores, up to the bounds of their errors."""
    K = chosen.shape[1]
    for t, row in enumerate(chosen):
        picked = row[row >= 0].long()
        assert picked.unique().numel() == picked.numel(), f"row {t} has a slot twice"
        window = slots[t, : int(visible[t].clamp(0, slots.shape[1]))]
        assert torch.isin(picked, window[window >= 0]).all(), f"row {t} has slots outside its window"
        assert (row < 0).sum() == (row == -1).sum(), f"row {t} has an entry that is no slot and not -1"
        if window.numel() <= K:
            assert picked.numel() == (window >= 0).sum(), f"row {t} sees at most K keys and lacks some"
            continue
        number = ~scores[t].isnan()
        best = scores[t][number].topk(min(K, int(number.sum()))).values
        assert picked.numel() == best.numel(), f"row {t} has {picked.numel()} keys instead of {best.numel()}"
        assert (row[picked.numel() :] == -1).all(), f"row {t} has -1 before slots"
        where = (window >= 0).nonzero().flatten()
        position = torch.full((int(slots.max()) + 1,), -1, device=slots.device).scatter(0, window[where], where)
        got = scores[t][position[picked]].sort(descending=True).values
        assert not got.isnan().any(), f"row {t} has a key whose score is NaN"
        allowed = 2 * float(bounds[t][number].amax()) if best.numel() else 0.0
        # equal infinities differ by NaN, which compares false
        far = (got != best) & ~((got - best).abs() <= allowed)
        assert not far.any(), f"row {t}: chosen scores {got[far].tolist()}, the best are {best[far].tolist()}"


class live_bytes(TorchDispatchMode):
    """Within it, ``peak`` is the most bytes that lived at once in tensors made since its start."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in before:
                    self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return result
