"""What bench_ops.py measures: ops at the attention sizes of DeepSeek-V3.2 and GLM-5, and who else computes the same.

``triton`` is ours. Other providers of an op keep its whole contract; names with ``alone`` are a library as its users
call it, on inputs in the form that it wants, with schedules made once a step and not once a layer; ``inductor alone``
is torch.compile's part of peer_pointwise.py.

Legend: T rows, B requests, HI index heads, D index head dim, H heads, L + R latent and rope dims, K top-k.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from compiled_dsa.benchmark.timing import limit_us, rotations
from compiled_dsa.custom_ops import OPS
from compiled_dsa.custom_ops.layout import FP8, PAGE, latent_pool_shape
from compiled_dsa.testing import random_index_pool, random_latent_pool

DEVICE = "cuda"
L, R, D, K = 512, 64, 128, 2048
MODELS = {"deepseek_v32": (128, 64, 128, 128), "glm_moe_dsa": (64, 32, 192, 256)}  # H, HI, N, V
HIDDEN = {"deepseek_v32": 7168, "glm_moe_dsa": 6144}
SCRATCH_BYTES = 2 << 30

Run = Callable[[tuple], object]


@dataclass
class Work:
    """One case, ready to run.

    Attributes:
        runs: name -> function of one element of ``inputs``; ``triton`` is ours.
        inputs: arguments that read different memory, taken in turn.
        moved: bytes that must be read and written.
        flop: in bf16 (fp32 accumulation), and in fp8.
        captured: measured as replays of a CUDA graph, but for the names in ``uncaptured``.
        not_run: name -> why it is not among the runs.
    """

    runs: dict[str, Run]
    inputs: list[tuple]
    moved: float
    flop: tuple[float, float] = (0.0, 0.0)
    captured: bool = True
    not_run: dict[str, str] = field(default_factory=dict)
    uncaptured: tuple[str, ...] = ()

    @property
    def limit_us(self) -> float:
        return limit_us(self.moved, *self.flop)


@dataclass(frozen=True)
class Case:
    """Attributes:
    op: what ``--only`` selects.
    sizes: what the record says of it, and the arguments of ``make``.
    quick: is it measured with ``--quick``?
    """

    op: str
    sizes: dict
    make: Callable[..., Work]
    quick: bool = False

    @property
    def name(self) -> str:
        return " ".join([self.op, *(f"{key}={value}" for key, value in self.sizes.items())])


def cases() -> Iterator[Case]:
    import bench_prefill  # these import this module
    import bench_rows

    for model in MODELS:
        for batch, context in ((1, 8192), (1, 131072), (32, 65536), (128, 32768)):
            sizes = {"model": model, "batch": batch, "context": context}
            yield Case("index_topk_decode", sizes, index_decode, batch == 1 and context == 8192)
    for batch, context in ((1, 8192), (128, 32768)):
        sizes = {"model": "deepseek_v32", "batch": batch, "context": context, "deterministic": True}
        yield Case("index_topk_decode", sizes, index_decode)
    for op, make in (("index_scores", index_scores), ("index_topk_prefill", index_prefill)):
        for model in MODELS:
            for rows, context in ((4096, 32768), (2048, 131072)):
                yield Case(op, {"model": model, "rows": rows, "context": context}, make, model == "glm_moe_dsa")
    prefill = {"model": "deepseek_v32", "rows": 4096, "context": 32768}
    yield Case("index_topk_prefill", prefill | {"deterministic": True}, index_prefill)
    for pool in ("bf16", "fp8"):
        yield Case("mla_prefill", prefill | {"pool": pool, "deterministic": True}, mla_prefill)
    for pool, heads, batches in (
        ("fp8", 128, (1, 4, 32, 128)),
        ("fp8", 64, (1, 4, 32)),
        ("fp8", 16, (1, 32)),
        ("bf16", 128, (1, 32, 128)),
        ("bf16", 64, (1, 32, 128)),
    ):
        for batch in batches:
            sizes = {"pool": pool, "heads": heads, "batch": batch}
            yield Case("sparse_mla_decode", sizes, attention_decode, batch == 1 and heads == 128)
    for batch in (1, 4, 32, 128):
        sizes = {"pool": "fp8", "heads": 128, "batch": batch, "deterministic": True}
        yield Case("sparse_mla_decode", sizes, attention_decode)
    for pool, contexts in (("bf16", (8192, 32768, 131072)), ("fp8", (32768, 131072))):
        for heads in (128, 64):
            for context in contexts:
                sizes = {"pool": pool, "heads": heads, "rows": 4096, "context": context}
                yield Case("sparse_attention_prefill", sizes, attention_prefill, context == 32768 and heads == 64)
    for model in MODELS:
        sizes = {"model": model, "rows": 4096, "context": 32768}
        for pool in ("bf16", "fp8"):
            yield Case("mla_prefill", sizes | {"pool": pool}, mla_prefill)
        yield Case("mla_prefill", sizes | {"pool": "fp8", "tokens": 1 << 20}, mla_prefill)
        for rows in (2048, 4096):
            yield Case("mla_prefill", {"model": model, "rows": rows, "start": 0}, bench_prefill.first_prefill)
    for make in (bench_rows.store_latents, bench_rows.store_index_keys, bench_rows.store_tokens):
        for rows in (1, 16, 128, 4096):
            yield Case(make.__name__, {"rows": rows}, make, rows == 16)
    for make, counts in ((bench_rows.encode_queries, (1, 16, 128, 4096)), (bench_rows.unabsorb, (1, 16, 128))):
        for model in MODELS:
            for rows in counts:
                yield Case(make.__name__, {"model": model, "rows": rows}, make, rows == 16)
    for model in MODELS:
        for rows in (1, 16):
            yield Case("select_and_absorb", {"model": model, "rows": rows}, bench_rows.select_and_absorb, rows == 1)
        for rows in (1, 16, 64):
            yield Case("skinny_linear", {"model": model, "rows": rows}, bench_rows.skinny_linear, rows == 16)
    yield Case("batch_metadata", {}, bench_rows.batch_metadata, True)
    # last, since FlashMLA was seen to fault at this size: then the process ends, and all else is written already
    yield Case("sparse_mla_decode", {"pool": "fp8", "heads": 16, "batch": 128}, attention_decode)


def selected(only: str | None, quick: bool) -> list[Case]:
    """Cases whose name holds one of the comma-separated words; a word may be an op or a part such as ``heads=16``."""
    words = only.split(",") if only else [""]
    return [case for case in cases() if any(w in case.name for w in words) and (case.quick or not quick)]


# ---- who runs --------------------------------------------------------------------------------------------------------


def by_provider(op: str, inputs: list[tuple], providers: list[str]) -> tuple[dict[str, Run], dict[str, str]]:
    """Runs of the op by the providers that take its arguments, and the reasons of the others."""
    runs: dict[str, Run] = {}
    not_run = {}
    for name in providers or OPS[op].providers:
        reason = OPS[op].refusal(name, *inputs[0])
        if reason is None:
            runs[name] = lambda args, name=name: OPS[op].overload(*args, provider=name)
        else:
            not_run[name] = reason
    return runs, not_run


def alone(name: str, libraries: list[str], providers: list[str], make: Callable[[], Run]) -> tuple[dict, dict]:
    """({name: run}, {}) of what needs libraries, or ({}, {name: why not})."""
    from compiled_dsa.custom_ops.providers.common import load

    left_out = [library for library in libraries if providers and library not in providers]
    if left_out:
        return {}, {name: f"{left_out[0]} is not among --providers"}
    try:
        for library in libraries:
            load(library)
    except ImportError as error:
        return {}, {name: str(error)}
    return {name: make()}, {}


def by_default(op: str, deterministic: bool) -> dict[str, Run]:
    place, call = list(OPS[op].arguments).index("deterministic"), partial(OPS[op].overload, provider="triton")
    runs: dict[str, Run] = {"triton by default": lambda args: call(*args[:place], False, *args[place + 1 :])}
    return runs if deterministic else {}


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def int32(*shape: int, fill: int = 0) -> Tensor:
    return torch.full(shape, fill, dtype=torch.int32, device=DEVICE)


# ---- index scores and top-k ------------------------------------------------------------------------------------------


def index_decode(providers: list[str], model: str, batch: int, context: int, deterministic: bool = False) -> Work:
    HI, W = MODELS[model][1], context // PAGE
    moved = batch * (context * (D + 4) + HI * (D + 4) + 4 * K)
    n = rotations(moved)
    pool = random_index_pool(n * batch * W, D, FP8, DEVICE)
    tables = torch.randperm(n * batch * W, device=DEVICE).view(n, batch, W).int()
    rows = torch.arange(batch, dtype=torch.int32, device=DEVICE), int32(batch, fill=context)
    q, weights = bf16(batch, HI, D).to(FP8), torch.randn(batch, HI, device=DEVICE)
    inputs = [(q, weights, pool, table, *rows, int32(batch, K), deterministic) for table in tables]
    runs, not_run = by_provider("index_topk_decode", inputs, providers)

    def library() -> Run:
        import deep_gemm
        import flashinfer

        lengths = rows[1][:, None].contiguous()
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, deep_gemm.get_num_sms())
        cache = pool.view(-1, PAGE, 1, D + 4)

        def run(args):
            scores = deep_gemm.fp8_paged_mqa_logits(q[:, None], cache, weights, lengths, args[3], schedule, context)
            flashinfer.top_k_page_table_transform(
                scores, args[3], rows[1], K, dsa_graph_safe=True, page_size=PAGE, out=args[6]
            )

        return run

    more, missing = alone("deep_gemm + flashinfer alone", ["deep_gemm", "flashinfer"], providers, library)
    more |= by_default("index_topk_decode", deterministic)
    flop = 2.0 * batch * context * HI * D
    return Work(runs | more, inputs, moved, (0.0, flop), True, not_run | missing)


def prefill_rows(model: str, rows: int, context: int, deterministic: bool = False) -> tuple[list[tuple], float, float]:
    """Arguments of index_topk_prefill for the last tokens of one request, what they move, and their FLOP."""
    HI, W = MODELS[model][1], context // PAGE
    visible = torch.arange(context - rows + 1, context + 1, dtype=torch.int32, device=DEVICE)
    q, weights = bf16(rows, HI, D).to(FP8), torch.randn(rows, HI, device=DEVICE)
    inputs = []
    for _ in range(2):
        table = torch.randperm(W, device=DEVICE).int()[None]
        pool = random_index_pool(W, D, FP8, DEVICE)
        inputs.append((q, weights, pool, table, int32(rows), visible, int32(rows, K), deterministic, SCRATCH_BYTES))
    return inputs, context * (D + 4) + rows * (HI * (D + 4) + 4 * K), 2.0 * float(visible.sum()) * HI * D


def logits(args: tuple) -> Callable[[], Tensor]:
    """DeepGEMM's scores of the arguments of index_topk_prefill, its keys gathered beforehand."""
    import deep_gemm

    from compiled_dsa.custom_ops.kernels.gather_index_keys import gather_index_keys

    keys, start, columns = gather_index_keys(args[2], args[3]), int32(args[0].shape[0]), args[3].shape[1] * PAGE
    return lambda: deep_gemm.fp8_mqa_logits(args[0], keys, args[1], start, args[5], False, max_seqlen_k=columns)


def index_scores(providers: list[str], model: str, rows: int, context: int) -> Work:
    """Scores without a selection; the FLOP are those of visible keys."""
    from compiled_dsa.custom_ops.kernels.index_scores import write_scores

    inputs, moved, flop = prefill_rows(model, rows, context)
    scores = torch.empty(rows, context, device=DEVICE)
    runs: dict[str, Run] = {"triton": lambda a: write_scores(*a[:6], scores, scores, K, 0, rows)}

    def library() -> Run:
        made = {id(args): logits(args) for args in inputs}
        return lambda args: made[id(args)]()

    more, missing = alone("deep_gemm alone", ["deep_gemm"], providers, library)
    return Work(runs | more, inputs, moved + 4.0 * rows * context, (0.0, flop), False, missing)


def index_prefill(providers: list[str], model: str, rows: int, context: int, deterministic: bool = False) -> Work:
    inputs, moved, flop = prefill_rows(model, rows, context, deterministic)
    runs, not_run = by_provider("index_topk_prefill", inputs, providers)

    def library() -> Run:
        import flashinfer

        made = {id(args): logits(args) for args in inputs}

        def run(args):
            options = {"row_to_batch": args[4], "page_size": PAGE, "out": args[6]}
            flashinfer.top_k_page_table_transform(made[id(args)](), args[3], args[5], K, **options)

        return run

    more, missing = alone("deep_gemm + flashinfer alone", ["deep_gemm", "flashinfer"], providers, library)
    more |= by_default("index_topk_prefill", deterministic)
    return Work(runs | more, inputs, moved, (0.0, flop), False, not_run | missing)


# ---- attention -------------------------------------------------------------------------------------------------------


def row_bytes(pool: str) -> int:
    return latent_pool_shape(1, L, R, FP8 if pool == "fp8" else torch.bfloat16)[0][2] * (1 if pool == "fp8" else 2)


def latent_pool(pool: str, tokens: int) -> Tensor:
    return random_latent_pool(tokens // PAGE, L, R, FP8 if pool == "fp8" else torch.bfloat16, DEVICE)


def random_ids(rows: int, tokens: int) -> Tensor:
    """int32 [rows, K], distinct in a row: steps of an odd size through a power of two of tokens."""
    start = torch.randint(tokens, (rows, 1), device=DEVICE)
    step = 2 * torch.randint(tokens // 2, (rows, 1), device=DEVICE) + 1
    return ((start + step * torch.arange(K, device=DEVICE)) % tokens).int()


def attention_decode(
    providers: list[str], pool: str, heads: int, batch: int, tokens: int = 1 << 18, deterministic: bool = False
) -> Work:
    """Ids anywhere in a pool of 170 (fp8) or 300 MB; each element of the inputs has others."""
    moved = batch * (K * row_bytes(pool) + heads * 2 * (2 * L + R))
    latents, scale = latent_pool(pool, tokens), (128 + R) ** -0.5
    q, rope, count = bf16(batch, heads, L), bf16(batch, heads, R), int32(batch, fill=K)
    table, out, lse = int32(batch, 1), bf16(batch, heads, L), torch.empty(batch, heads, device=DEVICE)
    inputs = [
        (q, rope, latents, random_ids(batch, tokens), count, table, int32(batch), scale, None, out, lse, deterministic)
        for _ in range(rotations(moved))
    ]
    runs, not_run = by_provider("sparse_mla_decode", inputs, providers)
    library = partial(flash_mla_decode, q, rope, latents, scale)
    more, missing = alone("flash_mla alone", ["flash_mla"], providers, library)
    more |= by_default("sparse_mla_decode", deterministic)
    flop = 2.0 * batch * K * heads * (2 * L + R)
    faults = pool == "fp8" and heads <= 64 < batch  # in replays, see providers/flash_mla.py
    return Work(
        runs | more, inputs, moved, (flop, 0.0), True, not_run | missing, ("flash_mla alone",) if faults else ()
    )


def flash_mla_decode(q: Tensor, rope: Tensor, latents: Tensor, scale: float) -> Run:
    """FlashMLA's kernel for the pool's format, over queries that are joined and padded beforehand."""
    import flash_mla

    from compiled_dsa.custom_ops.providers.flash_mla import joined_queries

    batch, heads = q.shape[:2]
    joined = joined_queries(batch, heads, R, q)
    joined[:, :heads] = torch.cat([q, rope], dim=-1)
    if latents.dtype != torch.uint8:
        keys = latents.view(-1, 1, L + R)
        return lambda a: flash_mla.flash_mla_sparse_fwd(joined, keys, a[3][:, None], scale, use_legacy=True)
    cache, schedule = latents.view(-1, PAGE, 1, latents.shape[2]), flash_mla.get_mla_metadata()[0]
    return lambda a: flash_mla.flash_mla_with_kvcache(
        joined[:, None], cache, None, None, L, schedule, softmax_scale=scale, indices=a[3][:, None], use_legacy=True
    )


def attention_prefill(providers: list[str], pool: str, heads: int, rows: int, context: int) -> Work:
    """Absorbed attention alone, inside mla_prefill; an fp8 pool is dequantised whole in it."""
    from compiled_dsa.custom_ops.kernels import sparse_mla_gluon
    from compiled_dsa.custom_ops.kernels.dequantise import dequantise

    scale = (128 + R) ** -0.5
    q, rope, count, out = bf16(rows, heads, L), bf16(rows, heads, R), int32(rows, fill=K), bf16(rows, heads, L)
    inputs = [(latent_pool(pool, context), random_ids(rows, context)) for _ in range(2)]
    fp8 = pool == "fp8"

    def ours(args):
        latents = dequantise(args[0], L, R) if fp8 else args[0]
        sparse_mla_gluon.launch(q, rope, latents, args[1], count, count[None], count, scale, None, out, None)

    def library() -> Run:
        import flash_mla

        joined = torch.cat([q, rope], dim=-1)

        def run(args):
            latents = dequantise(args[0], L, R) if fp8 else args[0]
            flash_mla.flash_mla_sparse_fwd(
                joined, latents.view(-1, 1, L + R), args[1][:, None], scale, use_legacy=True, return_log2_lse=False
            )

        return run

    def in_fp8() -> Run:
        import flash_mla

        joined, schedule = torch.cat([q, rope], dim=-1)[None], flash_mla.get_mla_metadata()[0]
        return lambda args: flash_mla.flash_mla_with_kvcache(
            joined, args[0].view(-1, PAGE, 1, args[0].shape[2]), None, None, L, schedule,
            softmax_scale=scale, indices=args[1][None], use_legacy=True,
        )  # fmt: skip

    name = "dequantised + flash_mla alone" if fp8 else "flash_mla alone"
    more, missing = alone(name, ["flash_mla"], providers, library)
    if fp8:
        for found, into in zip(alone("flash_mla in fp8 alone", ["flash_mla"], providers, in_fp8), (more, missing)):
            into.update(found)
    moved = context * row_bytes(pool) + rows * (heads * 2 * (2 * L + R) + 4 * K)
    flop = 2.0 * rows * K * heads * (2 * L + R)
    return Work({"triton": ours, **more}, inputs, moved, (flop, 0.0), False, missing)


def mla_prefill(
    providers: list[str],
    model: str,
    pool: str,
    rows: int,
    context: int,
    deterministic: bool = False,
    tokens: int | None = None,
) -> Work:
    """``tokens``: of the pool; more than ``context`` where other requests hold the rest."""
    H, _, N, V = MODELS[model]
    q, rope, kv_b, out = bf16(rows, H, N), bf16(rows, H, R), bf16(H, N + V, L), bf16(rows, H, V)
    count, scale, tokens = int32(rows, fill=K), (N + R) ** -0.5, tokens or context
    inputs = []
    for _ in range(2):
        table = torch.randperm(tokens // PAGE, device=DEVICE)[: context // PAGE].int()[None]
        ids = random_ids(rows, context)
        slots = table[0, ids // PAGE] * PAGE + ids % PAGE
        where = (latent_pool(pool, tokens), slots, count, table, int32(rows))
        inputs.append((q, rope, *where, kv_b, scale, None, out, SCRATCH_BYTES, None, deterministic, True))
    runs, not_run = by_provider("mla_prefill", inputs, providers)
    flop = 2.0 * rows * H * (K * (2 * L + R) + L * (N + V))
    moved = context * row_bytes(pool) + rows * H * 2 * (N + R + V) + kv_b.nbytes
    runs |= by_default("mla_prefill", deterministic)
    if tokens > context:
        runs["pages of any request"] = lambda args: OPS["mla_prefill"].overload(*args[:-1], False)
    return Work(runs, inputs, moved, (flop, 0.0), False, not_run)
