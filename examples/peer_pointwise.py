"""What lies between the products of the layer of peer_composition.py: plain torch, compiled by Inductor.

Legend: T rows, H heads, R rope dim, L latent dim, HI index heads, D index head dim, n tokens of the context.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

FP8, FP8_MAX, PAGE, GROUP = torch.float8_e4m3fn, 448.0, 64, 128  # as the libraries' cache formats have them


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(weight.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)


def as_bytes(x: Tensor) -> Tensor:
    """uint8 [T, n * itemsize] of a tensor [T, n], in arithmetic that fuses (views that change a width do not)."""
    if x.element_size() == 1:
        return x.view(torch.uint8)
    words = x.view(torch.int32) if x.element_size() == 4 else x.view(torch.int16).int()
    shifts = 8 * torch.arange(x.element_size(), device=x.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 255).to(torch.uint8).flatten(-2)


def quantized(x: Tensor, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """(e4m3 [..., n], fp32 scales [..., 1]) of fp32 [..., n]."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / FP8_MAX
    if power_of_two:
        scale = scale.clamp(min=1e-4).log2().ceil().exp2()
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


class Pointwise:
    """What lies between the products of a layer with ``config``; ``compiled``: by Inductor, else as it is.

    ``dynamic``: as of torch.compile.
    """

    def __init__(self, config: Any, compiled: bool = True, dynamic: bool | None = None):
        self.c = config
        compile_part = torch.compile(fullgraph=True, dynamic=dynamic) if compiled else lambda function: function
        self.after_first = compile_part(self._after_first)
        self.after_second = compile_part(self._after_second)
        self.gathered = compile_part(self._gathered)

    def _after_first(self, a, norms, cos, sin, slots, latent_rows, key_bytes) -> tuple[Tensor, Tensor]:
        """Norms, the keys' ropes, and the stores into both caches: (q_lora [T, q_lora_rank], head weights [T, HI])."""
        c = self.c
        L, R, D = c.kv_lora_rank, c.qk_rope_head_dim, c.index_head_dim
        q, latents, rope, keys, head_weights = a.split([c.q_lora_rank, L, R, D, c.index_n_heads], dim=-1)
        q_lora = rms(q, norms[0], c.latent_norm_eps)

        latents = rms(latents, norms[1], c.latent_norm_eps).float().unflatten(-1, (-1, min(GROUP, L)))
        codes, scales = quantized(latents, power_of_two=True)
        rope = rotate(rope, cos, sin, c.rope_interleaved)
        row = torch.cat([as_bytes(codes.flatten(-2)), as_bytes(scales.flatten(-2)), as_bytes(rope)], dim=-1)
        latent_rows.index_put_((slots,), row)

        keys = layer_norm(keys.float(), (D,), norms[2], norms[3], c.index_k_norm_eps)
        codes, scales = quantized(self._index_rope(keys, cos, sin))
        row = torch.cat([as_bytes(codes), as_bytes(scales)], dim=-1)  # [T, D + 4]
        page, offset = (slots // PAGE * PAGE * (D + 4))[:, None], (slots % PAGE)[:, None]
        byte = torch.arange(D + 4, device=a.device)
        key_bytes.index_put_((page + torch.where(byte < D, offset * D, (PAGE - 1) * D + offset * 4) + byte,), row)
        return q_lora, head_weights.float()

    def _after_second(self, b, head_weights, cos, sin, rope_out) -> tuple[Tensor, Tensor]:
        """The queries' ropes, one into ``rope_out`` [T, H, R], and quantisation of the index queries: (e4m3 [T, HI, D],
        fp32 weights [T, HI] with every factor folded in)."""
        c = self.c
        q, index_q = b.split([c.num_heads * c.qk_head_dim, c.index_n_heads * c.index_head_dim], dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        rope = q.unflatten(-1, (c.num_heads, c.qk_head_dim))[..., c.qk_nope_head_dim :]
        rope_out.copy_(rotate(rope, cos, sin, c.rope_interleaved))
        index_q = index_q.unflatten(-1, (c.index_n_heads, c.index_head_dim)).float()
        codes, scales = quantized(self._index_rope(index_q, cos, sin))
        return codes, head_weights * scales[..., 0] * (c.index_n_heads**-0.5 * c.index_head_dim**-0.5)

    def _index_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        R = self.c.qk_rope_head_dim
        return torch.cat([rotate(x[..., :R], cos, sin, self.c.index_format.rope_interleaved), x[..., R:]], dim=-1)

    def _gathered(self, codes, scales, rope, key_codes, key_scales, slots) -> tuple[Tensor, Tensor, Tensor]:
        """A request's tokens end to end: latents bf16 [n, L + R], index keys as bytes [n, D] and their scales [n]."""
        groups = codes[slots].float().unflatten(-1, (scales.shape[1], -1)) * scales[slots][..., None]
        page, offset = slots // PAGE, slots % PAGE
        latents = torch.cat([groups.flatten(-2).to(rope.dtype), rope[slots]], dim=-1)
        return latents, key_codes[page, offset], key_scales[page, offset]
