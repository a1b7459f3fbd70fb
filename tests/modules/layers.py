"""One attention layer of transformers beside ours, and batches of requests over page pools."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compiled_dsa import Batch, DSAConfig, PagePool, SparseAttention
from compiled_dsa.attention import RMSNorm
from tests.huggingface.tiny_models import tiny_config, tiny_model


def tiny_dsa_config(model_type: str = "deepseek_v32", layer: int = 0, **sizes) -> DSAConfig:
    return DSAConfig.from_hf(tiny_config(model_type, **sizes), layer)


def stock_layer(model_type: str, dtype: torch.dtype, layer: int = 0, **sizes) -> nn.Module:
    """transformers' attention module, its RMS norms (fp32 whatever the dtype) replaced by ones of full precision."""
    module = tiny_model(model_type, dtype, **sizes).get_decoder().layers[layer].self_attn
    if dtype == torch.float64:
        for name, norm in [(n, m) for n, m in module.named_children() if type(m).__name__.endswith("RMSNorm")]:
            exact = RMSNorm(norm.weight.shape[0], norm.variance_epsilon, dtype=dtype)
            exact.load_state_dict(norm.state_dict())
            setattr(module, name, exact)
    return module


def our_layer(stock: nn.Module) -> SparseAttention:
    config = DSAConfig.from_hf(stock.config, stock.layer_idx)
    ours = SparseAttention(config, dtype=stock.o_proj.weight.dtype)
    ours.load_state_dict(stock.state_dict(), strict=True)
    return ours


def angles(positions: Tensor, R: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [..., R/2] of positions [...]."""
    inverse = 1e4 ** -(torch.arange(0, R, 2, dtype=torch.float64) / R)
    angle = positions[..., None].double() * inverse
    return angle.cos().to(dtype), angle.sin().to(dtype)


def stock_outputs(
    stock: nn.Module, x: Tensor, prev_topk: Tensor | None = None, shared_kv: dict | None = None
) -> tuple[Tensor, Tensor | None]:
    """transformers' layer over one whole sequence x [n, hidden]: (outputs [n, hidden], selection or None).

    ``shared_kv``: latents that layers of mistral_large4 leave to later ones.
    """
    n = x.shape[0]
    embedding = [torch.cat([a, a], -1).unsqueeze(0) for a in angles(torch.arange(n), stock.qk_rope_head_dim, x.dtype)]
    mask = torch.full((1, 1, n, n), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)  # additive: eager takes no other
    if getattr(stock, "sliding_window", None) is not None:
        mask += torch.full_like(mask, torch.finfo(x.dtype).min).tril(-stock.sliding_window)
    more = {} if prev_topk is None else {"prev_topk_indices": prev_topk}
    if hasattr(stock, "is_kv_shared_layer"):
        more["shared_kv_states"] = {} if shared_kv is None else shared_kv
        more["position_ids"] = torch.arange(n).unsqueeze(0)
    with torch.no_grad():
        out, *rest = stock(x.unsqueeze(0), embedding, mask, **more)
    return out[0], rest[1] if len(rest) > 1 else None


@dataclass
class Serving:
    """Requests whose tokens come in any portions, through one or more of our layers over a shared page pool."""

    layers: list[SparseAttention]
    pool: PagePool
    x: list[Tensor]  # [n, hidden] of each request
    held: list[int]

    @classmethod
    def of(cls, layers, x: list[Tensor], latent_dtype=None, index_dtype=None, poison: bool = True) -> "Serving":
        dtype = x[0].dtype
        pool = PagePool(
            [layer.dsa_config for layer in layers],
            num_pages=2 * sum(-(-len(request) // 64) for request in x) + 1,
            max_requests=len(x),
            max_len=max(map(len, x)),
            latent_dtype=latent_dtype or dtype,
            index_dtype=index_dtype or dtype,
            device="cpu",
        )
        if poison:  # memory that no token was written to: NaN, in fp8 layouts too
            for tensor in (t for layer in pool.layers for t in layer.tensors()):
                tensor.view(torch.uint8).fill_(0xFF)
        for request in reversed(range(len(x))):
            pool.reserve(request, len(x[request]))
        return cls(list(layers), pool, x, [0] * len(x))

    def inputs(self, new: list[int], padding: int = 0, **batch_options) -> tuple[Tensor, Tensor, Tensor, Batch]:
        """x, cos, sin and the batch of the next ``new[r]`` tokens of each request, then rows of padding (NaN)."""
        dtype, hidden = self.x[0].dtype, self.x[0].shape[1]
        parts = [request[held : held + n] for request, held, n in zip(self.x, self.held, new)]
        x = torch.cat([*parts, torch.full((padding, hidden), torch.nan, dtype=dtype)])
        self.held = [held + n for held, n in zip(self.held, new)]
        batch = Batch.from_lengths(
            torch.tensor(new), torch.tensor(self.held), self.pool.page_table, x.shape[0], **batch_options
        )
        cos, sin = angles(batch.positions, self.layers[0].dsa_config.qk_rope_head_dim, dtype)
        return x, cos, sin, batch

    def step(self, new: list[int], padding: int = 0, **batch_options) -> list[Tensor]:
        """Outputs of the layers for those rows; a layer that shares takes the selection of the layer before."""
        x, cos, sin, batch = self.inputs(new, padding, **batch_options)
        outputs, topk = [], None
        with torch.no_grad():
            for layer, pools in zip(self.layers, self.pool.layers):
                out, topk = layer(x, cos, sin, batch, pools, topk)
                outputs.append(out)
        return outputs

    def latest(self, per_request: list[Tensor], new: list[int]) -> Tensor:
        """Of tensors [n, ...], one a request, the rows of the last step."""
        return torch.cat([t[held - n : held] for t, held, n in zip(per_request, self.held, new)])
