"""What ``python -m compiled_dsa bench`` measures, and what no implementation can beat.

Legend: T rows, B requests, H heads, N nope dim, R rope dim, L latent dim, V value dim, HI index heads, D index head
dim, K top-k.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from compiled_dsa.batch import DECODE, PREFILL
from compiled_dsa.benchmark.timing import limit_us
from compiled_dsa.config import DSAConfig, IndexFormat
from compiled_dsa.custom_ops.layout import FP8, PAGE, index_pool_shape, latent_pool_shape

LAYER, MODEL = "layer", "model"
HF_EAGER, HF_SDPA, HF_COMPILED, COMPOSITION = "hf_eager", "hf_sdpa", "hf_compiled", "composition"
HF = (HF_EAGER, HF_SDPA, HF_COMPILED)
MODEL_LAYERS, MODEL_STEPS = 4, 32  # of the cases of whole models: layers, and tokens generated

# One layer at the sizes of transformers' default configs; tests compare.
SIZES = {
    "deepseek_v32": {
        "hidden_size": 7168,
        "num_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "index_n_heads": 64,
        "index_format": IndexFormat(rope_interleaved=False),
    },
    "glm_moe_dsa": {
        "hidden_size": 6144,
        "num_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "index_format": IndexFormat(rope_interleaved=True),
    },
}


def layer_config(model: str) -> DSAConfig:
    """Raises ValueError: ``model`` is not among ``SIZES``."""
    if model not in SIZES:
        raise ValueError(f"model={model!r}; it must be one of {', '.join(SIZES)}")
    sizes: dict = SIZES[model]
    return DSAConfig(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        index_topk=2048,
        scale=(sizes["qk_nope_head_dim"] + 64) ** -0.5,
        **sizes,
    )


@dataclass(frozen=True)
class BenchCase:
    """One line of the table.

    Attributes:
        level: "layer", or "model": ``MODEL_LAYERS`` layers through ``compile_model``.
        kind: "decode": one token of each of ``batch`` requests; "prefill": ``rows`` tokens of one request.
        context: tokens of each request after the step.
        modes: of ``compile_model(graphs=...)``, the one that the package recommends first: its time is ``ours_us``.
        peers: who is asked to run it; "composition" only at the layer's level.
        quick: is it measured with ``--quick``?
    """

    model: str
    level: str
    kind: str
    batch: int
    context: int
    rows: int
    modes: tuple[str, ...]
    peers: tuple[str, ...]
    quick: bool = False

    @property
    def name(self) -> str:
        size = f"B={self.batch}" if self.kind == DECODE else f"rows={self.rows}"
        return f"{self.model} {self.level} {self.kind} {size} ctx={self.context}"

    @property
    def tokens(self) -> int:
        """Rows of the step."""
        return self.batch if self.kind == DECODE else self.rows


# batch, context, peers of transformers, quick
_DECODE = (
    (1, 8192, HF, True),
    (16, 8192, HF, False),
    (128, 32768, (), False),
    (1, 65536, (), False),
    (32, 32768, (), False),
    (64, 8192, (), False),
    (128, 8192, (), False),
)
# rows, context, peers of transformers, quick
_PREFILL = (
    (4096, 4096, (HF_COMPILED, HF_SDPA, HF_EAGER), True),
    (8192, 8192, (HF_SDPA, HF_COMPILED, HF_EAGER), False),
    (4096, 32768, (), False),
    (4096, 131072, (), False),
)


def cases(model: str) -> Iterator[BenchCase]:
    """The cases of a model, the most important ones first."""
    decode = [
        BenchCase(model, LAYER, DECODE, batch, context, batch, ("full", "off"), (COMPOSITION, *peers), quick)
        for batch, context, peers, quick in _DECODE
    ]
    prefill = [
        BenchCase(
            model, LAYER, PREFILL, 1, context, rows, ("breakable", "full", "piecewise"), (COMPOSITION, *peers), quick
        )
        for rows, context, peers, quick in _PREFILL
    ]
    yield from decode[:2] + prefill[:2] + decode[2:] + prefill[2:]
    for batch in (1, 16):
        yield BenchCase(model, MODEL, DECODE, batch, 8192, batch, ("auto",), (HF_SDPA,))


def selected(model: str, only: str | None = None, quick: bool = False) -> list[BenchCase]:
    """Cases whose name holds one of the comma-separated parts of ``only``; with ``quick``, the quick ones of them, less
    what takes long: compiling in pieces, compiled and eager transformers."""
    words = only.split(",") if only else [""]
    chosen = [case for case in cases(model) if any(w in case.name for w in words)]
    if not quick:
        return chosen
    return [
        replace(
            case,
            modes=tuple(m for m in case.modes if m != "piecewise"),
            peers=tuple(p for p in case.peers if p not in (HF_COMPILED, HF_EAGER)),
        )
        for case in chosen
        if case.quick
    ]


# ---- limits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """What one part of a layer must move (bytes) and compute (FLOP), at least."""

    name: str
    moved: float
    bf16_flop: float = 0.0
    fp8_flop: float = 0.0

    @property
    def us(self) -> float:
        return limit_us(self.moved, self.bf16_flop, self.fp8_flop)


def weight_elements(c: DSAConfig) -> dict[str, int]:
    """Elements of the matrices of a layer, by the product that reads them."""
    down, up = c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim, c.num_heads * c.qk_head_dim
    if not c.index_shared:
        down += c.index_head_dim + c.index_n_heads
        up += c.index_n_heads * c.index_head_dim
    return {
        "q_a, kv_a, wk, weights_proj": c.hidden_size * down,
        "q_b, wq_b": c.q_lora_rank * up,
        "absorb": c.kv_lora_rank * c.num_heads * c.qk_nope_head_dim,
        "un-absorb": c.kv_lora_rank * c.num_heads * c.v_head_dim,
        "o_proj": c.num_heads * c.v_head_dim * c.hidden_size,
    }


def stages(c: DSAConfig, kind: str, requests: int, context: int, rows: int) -> list[Stage]:
    """The stages of one layer with weights in bf16 and fp8 caches; of one with ``index_shared``, without an indexer.

    Weights, index keys and selected latents are read once; activations, scores and what is stored are left out, so that
    this is a lower bound. In a prefill, rows that see at most K keys need no scores, and could attend expanded keys: as
    many products for the expansion as absorption takes, and N + R + V instead of 2 L + R for a pair of query and key.

    Args:
        requests: B.
        context: tokens of each request after the step.
        rows: rows of the step: B in decode; of the one request in a prefill.
    """
    H, L, R, K, D = c.num_heads, c.kv_lora_rank, c.qk_rope_head_dim, c.index_topk, c.index_head_dim
    latent_bytes = latent_pool_shape(1, L, R, FP8)[0][2]
    key_bytes = index_pool_shape(1, D, FP8)[0][1] // PAGE
    if kind == DECODE:
        scored = rows * context
        dense, sparse = 0, rows * min(K, context)
        latents_read = sparse
    else:
        before = context - rows
        few = max(0, min(rows, K - before))  # rows that see at most K keys
        dense = few * before + few * (few + 1) // 2
        scored = rows * before + rows * (rows + 1) // 2 - dense
        sparse = (rows - few) * K
        latents_read = min(context, dense + sparse)
    products = [Stage(name, 2.0 * n, 2.0 * rows * n) for name, n in weight_elements(c).items()]
    logits = Stage("logits", requests * context * key_bytes, 0.0, 2.0 * scored * c.index_n_heads * D)
    flop = 2.0 * H * (sparse * (2 * L + R) + dense * (c.qk_head_dim + c.v_head_dim))
    attention = Stage("attention", latents_read * latent_bytes, flop)
    indexer = [] if c.index_shared else [logits]
    return [*products[:2], *indexer, products[2], attention, *products[3:]]


@dataclass(frozen=True)
class Limits:
    """Lower bounds of the time of a layer, in microseconds.

    Attributes:
        bytes: of everything that must be read.
        limit: the larger of that and all FLOP.
        stages: the sum over stages of the larger of bytes and FLOP: what no implementation beats that runs its stages
            one after another.
    """

    bytes: float
    limit: float
    stages: float


def limits(layers: Sequence[DSAConfig], kind: str, requests: int, context: int, rows: int) -> Limits:
    """Of these layers together; other arguments as of ``stages``."""
    parts = [stages(c, kind, requests, context, rows) for c in layers]
    totals = [tuple(sum(getattr(s, of) for s in p) for of in ("moved", "bf16_flop", "fp8_flop")) for p in parts]
    return Limits(
        bytes=sum(limit_us(moved) for moved, *_ in totals),
        limit=sum(limit_us(*total) for total in totals),
        stages=sum(s.us for p in parts for s in p),
    )


def case_limits(case: BenchCase) -> Limits:
    """Of the layers of a case; the MLPs of a whole model are small and left out."""
    c = layer_config(case.model)
    layers = [c]
    if case.level == MODEL:  # every third layer of GLM-5 selects, the two after it share its selection
        shares = case.model == "glm_moe_dsa"
        layers = [replace(c, index_shared=shares and i % 3 > 0) for i in range(MODEL_LAYERS)]
    return limits(layers, case.kind, case.batch, case.context, case.tokens)
