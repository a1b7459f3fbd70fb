"""One layer in fp64, written down from the formulas and nothing of the package's modules or ops: the oracle.

Cached tokens are taken as they were before they were rounded to fp8, and the step's own tokens are computed from its
hidden states, so that the error of an implementation includes that of its caches.

Legend: T rows, H heads, N nope dim, R rope dim, L latent dim, V value dim, HI index heads, D index head dim, K top-k,
n keys that a row sees.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_dsa.benchmark.inputs import LayerInputs
from compiled_dsa.config import DSAConfig


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates pairs (0,1)(2,3).. or (0,R/2)(1,R/2+1).. of x [..., R]; pairs stay in place."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)


class ExactLayer:
    """The layer of a step for single rows.

    Args:
        weights: of the layer, by transformers' names.
    """

    def __init__(self, config: DSAConfig, weights: Mapping[str, Tensor], inputs: LayerInputs):
        self.c, self.inputs = config, inputs
        self.w = {name: tensor.double() for name, tensor in weights.items()}
        self.x, self.cos, self.sin = inputs.x.double(), inputs.cos.double(), inputs.sin.double()
        c = config
        down = self.x @ self.w["kv_a_proj_with_mqa.weight"].T
        latents = rms(down[:, : c.kv_lora_rank], self.w["kv_a_layernorm.weight"], c.latent_norm_eps)
        rope = rotated(down[:, c.kv_lora_rank :], self.cos, self.sin, c.rope_interleaved)
        self.new_latents = torch.cat([latents, rope], dim=1)  # [T, L + R]
        keys = torch.nn.functional.layer_norm(
            self.x @ self.w["indexer.wk.weight"].T,
            (c.index_head_dim,),
            self.w["indexer.k_norm.weight"],
            self.w["indexer.k_norm.bias"],
            c.index_k_norm_eps,
        )
        self.new_keys = self._index_rope(keys, self.cos, self.sin)  # [T, D]

    def _index_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        R, fmt = self.c.qk_rope_head_dim, self.c.index_format
        if fmt.rope_last or fmt.hadamard:
            raise ValueError(f"index_format={fmt}; the oracle knows the rope in the first dims, without Hadamard")
        return torch.cat([rotated(x[..., :R], cos, sin, fmt.rope_interleaved), x[..., R:]], dim=-1)

    def _keys(self, row: int, cached: Tensor, new: Tensor) -> Tensor:
        """fp64 [n, .]: what row sees, of cached tokens [P, 64, .] and the step's own [T, .]."""
        batch = self.inputs.batch
        request = int(batch.req_of_row[row])
        first = int(batch.q_start[request])
        past = int(batch.positions[first])
        slots = self.inputs.slots_of(request)[:past]
        return torch.cat([cached.flatten(0, 1)[slots].double(), new[first : row + 1]])

    def _q_lora(self, row: int) -> Tensor:
        q = self.w["q_a_proj.weight"] @ self.x[row]
        return rms(q, self.w["q_a_layernorm.weight"], self.c.latent_norm_eps)

    def select(self, row: int) -> Tensor:
        """Positions int64 [min(K, n)] of the keys that the indexer selects."""
        c = self.c
        q = (self.w["indexer.wq_b.weight"] @ self._q_lora(row)).view(c.index_n_heads, c.index_head_dim)
        q = self._index_rope(q, self.cos[row], self.sin[row])
        weights = self.w["indexer.weights_proj.weight"] @ self.x[row]
        keys = self._keys(row, self.inputs.caches.keys, self.new_keys)
        scores = weights @ (q @ keys.T).relu()  # [n]; constant factors do not change the order
        return scores.topk(min(c.index_topk, scores.shape[0])).indices

    def output(self, row: int, positions: Tensor) -> Tensor:
        """fp64 [hidden]: the layer's output of a row that attends ``positions``."""
        c = self.c
        H, N, L = c.num_heads, c.qk_nope_head_dim, c.kv_lora_rank
        q = (self.w["q_b_proj.weight"] @ self._q_lora(row)).view(H, c.qk_head_dim)
        q_rope = rotated(q[:, N:], self.cos[row], self.sin[row], c.rope_interleaved)
        kv_b = self.w["kv_b_proj.weight"].view(H, N + c.v_head_dim, L)
        absorbed = torch.einsum("hn,hnl->hl", q[:, :N], kv_b[:, :N])
        keys = self._keys(row, self.inputs.caches.latents, self.new_latents)[positions]  # [n, L + R]
        scores = (torch.cat([absorbed, q_rope], dim=1) @ keys.T) * c.scale
        attended = scores.softmax(-1) @ keys[:, :L]  # [H, L]
        values = torch.einsum("hl,hvl->hv", attended, kv_b[:, N:])
        return self.w["o_proj.weight"] @ values.flatten()


@dataclass(frozen=True)
class Accuracy:
    """Attributes:
    error: of the output against fp64 over the keys that the implementation selected: norm of the difference over norm.
    overlap: share of the keys that fp64 selects which the implementation selects too, mean of the rows.
    """

    error: float
    overlap: float


class Oracle:
    """Compares some rows of a step with fp64. What fp64 selects is computed once, for all implementations."""

    def __init__(self, config: DSAConfig, weights: Mapping[str, Tensor], inputs: LayerInputs, rows: int = 8):
        T = inputs.x.shape[0]
        self.exact = ExactLayer(config, weights, inputs)
        self.rows = sorted(set(torch.linspace(0, T - 1, min(rows, T)).round().int().tolist()))
        self.selected = [self.exact.select(row) for row in self.rows]

    def compare(self, output: Tensor, slots: Tensor) -> Accuracy:
        """Args:
        output: [T, hidden]; slots: int [T, K], physical slots that were attended, -1 past the last.
        """
        wanted, overlaps = [], []
        for row, best in zip(self.rows, self.selected):
            positions = self._positions(row, slots[row])
            overlaps.append(float(torch.isin(best, positions).double().mean()))
            wanted.append(self.exact.output(row, positions))
        want = torch.stack(wanted)
        got = output[self.rows].double()
        return Accuracy(float((got - want).norm() / want.norm()), sum(overlaps) / len(overlaps))

    def _positions(self, row: int, slots: Tensor) -> Tensor:
        """Positions of slots int [K] in the request of a row; -1 is left out.

        Raises:
            ValueError: a slot that the row does not see.
        """
        inputs = self.exact.inputs
        held = inputs.slots_of(int(inputs.batch.req_of_row[row]))[: int(inputs.batch.visible[row])]
        ordered, order = held.sort()
        chosen = slots[slots >= 0].long()
        place = torch.searchsorted(ordered, chosen).clamp(max=ordered.shape[0] - 1)
        if not torch.equal(ordered[place], chosen):
            raise ValueError(f"row {row} attends slots that it does not see")
        return order[place]
