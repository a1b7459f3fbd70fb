"""One DSA layer as an expert would assemble it from public libraries: what ours is compared with.

    python examples/peer_composition.py --model deepseek_v32 --only "decode B=1 " --json FILE
    python examples/peer_composition.py --topk torch --list

cuBLAS on packed weights (q_a, kv_a, wk and weights_proj in one product; q_b and wq_b in one; absorption and
un-absorption as batched products straight into and out of the attention's buffers), everything pointwise between them
compiled by Inductor (peer_pointwise.py), DeepGEMM's index scores, flashinfer's or torch's top-k, FlashMLA's attention:
over the fp8 cache in decode, in one CUDA graph; over dequantised latents in a prefill. Schedules of the libraries are
made once and not in each run, as a model of many layers would do it. Nothing of compiled_dsa computes anything here;
its benchmark parts give inputs, the clock and the fp64 oracle.

Legend: T rows, B requests, H heads, N nope dim, R rope dim, L latent dim, V value dim, HI index heads, D index head
dim, K top-k, W columns of the page table, n tokens of the context.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peer_pointwise import FP8, GROUP, PAGE, Pointwise
from rich.console import Console
from torch import Tensor
from torch.nn.functional import linear

from compiled_dsa.benchmark.cases import DECODE, LAYER, SIZES, case_limits, layer_config, selected
from compiled_dsa.benchmark.inputs import Caches, LayerInputs, Runnable, random_layer
from compiled_dsa.benchmark.reference import Oracle
from compiled_dsa.benchmark.timing import captured, device_us, keep, launches, provenance

TOPK = ("auto", "flashinfer", "torch")


# ---- the libraries ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Libraries:
    """The calls that are not products or pointwise. Selections are int32 [T, K], -1 past the last.

    Attributes:
        names: of what is called, for the record.
        plan: (lengths int32 [B]) -> schedules for decode, made once.
        decode_scores: (q e4m3 [B, HI, D], weights fp32 [B, HI], pool uint8 [P, 64 D + 256], page_table [B, W], lengths,
            plan) -> fp32 [B, 64 W], of which a row's first ``length`` are read.
        prefill_scores: (q, weights, keys e4m3 [n, D], scales fp32 [n], visible int32 [T]) -> fp32 [T, n].
        select: (scores, lengths int32 [T], K, page_table or None) -> slots, or positions where there is no page table.
        decode_attention: (q bf16 [B, H, L + R], pool uint8 [P, 64, 656], slots, scale, L, plan) -> [B, H, L].
        prefill_attention: (q, latents bf16 [n, L + R], positions, count int32 [T], scale, L) -> [T, H, L].
    """

    names: dict[str, str]
    plan: Callable[..., Any]
    decode_scores: Callable[..., Tensor]
    prefill_scores: Callable[..., Tensor]
    select: Callable[..., Tensor]
    decode_attention: Callable[..., Tensor]
    prefill_attention: Callable[..., Tensor]


def torch_select(scores: Tensor, lengths: Tensor, K: int, page_table: Tensor | None) -> Tensor:
    """torch.topk, for where flashinfer is not installed. What a row does not see comes last, its scores being -inf."""
    columns = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill(columns >= lengths[:, None], -torch.inf)
    positions = chosen = scores.topk(min(K, scores.shape[1]), dim=1).indices
    if page_table is not None:
        chosen = page_table.gather(1, positions // PAGE) * PAGE + positions % PAGE
    return torch.where(positions < lengths[:, None], chosen, -1).int()


def flashinfer_select() -> Callable[..., Tensor]:
    import flashinfer

    def select(scores: Tensor, lengths: Tensor, K: int, page_table: Tensor | None) -> Tensor:
        if page_table is None:
            offsets = torch.zeros_like(lengths)
            return flashinfer.top_k_ragged_transform(scores, offsets, lengths, K)
        slots = torch.empty(scores.shape[0], K, dtype=torch.int32, device=scores.device)
        flashinfer.top_k_page_table_transform(
            scores, page_table, lengths, K, dsa_graph_safe=True, page_size=PAGE, out=slots
        )
        return slots

    return select


def public_libraries(topk: str = "auto", compiled: bool = True) -> Libraries:
    """DeepGEMM, FlashMLA, and flashinfer or torch.topk.

    Args:
        topk: "auto": flashinfer where it is installed; its first call builds kernels for minutes.
        compiled: compile what masks scores for torch.topk.

    Raises:
        ImportError: a library is not installed, or does not load.
        ValueError: ``topk`` is none of the above.
    """
    if topk not in TOPK:
        raise ValueError(f"topk={topk!r}; it must be one of {', '.join(TOPK)}")
    import deep_gemm
    import flash_mla

    select, names = torch_select, {"scores": "deep_gemm", "topk": "torch.topk", "attention": "flash_mla"}
    if topk != "torch":
        try:
            select, names["topk"] = flashinfer_select(), "flashinfer"
        except ImportError:
            if topk == "flashinfer":
                raise
    if compiled and select is torch_select:
        select = torch.compile(torch_select, fullgraph=True)

    def plan(lengths: Tensor) -> tuple:
        lengths = lengths[:, None].contiguous()
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, deep_gemm.get_num_sms())
        return lengths, schedule, flash_mla.get_mla_metadata()[0]  # FlashMLA fills its own in the first call

    def decode_scores(q, weights, pool, page_table, lengths, plan):
        pages = pool.view(-1, PAGE, 1, q.shape[2] + 4)
        columns = page_table.shape[1] * PAGE
        return deep_gemm.fp8_paged_mqa_logits(q[:, None], pages, weights, plan[0], page_table, plan[1], columns, False)

    def prefill_scores(q, weights, keys, scales, visible):
        start = torch.zeros_like(visible)
        return deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, start, visible, False, max_seqlen_k=keys.shape[0])

    def decode_attention(q, pool, slots, scale, L, plan):
        out, _ = flash_mla.flash_mla_with_kvcache(
            q[:, None], pool.view(-1, PAGE, 1, pool.shape[2]), None, None, L, plan[2], softmax_scale=scale,
            is_fp8_kvcache=True, indices=slots[:, None], attn_sink=None, use_legacy=True,
        )  # fmt: skip
        return out[:, 0]

    def prefill_attention(q, latents, positions, count, scale, L):
        return flash_mla.flash_mla_sparse_fwd(
            q, latents[:, None], positions[:, None], scale, d_v=L, attn_sink=None, topk_length=count, use_legacy=True,
            return_log2_lse=False,
        )[0]  # fmt: skip

    return Libraries(names, plan, decode_scores, prefill_scores, select, decode_attention, prefill_attention)


class Composition:
    """The layer. Weights are packed once.

    Args:
        config: sizes, as ``DSAConfig`` names them.
        weights: bf16, by transformers' names.
        libraries: what is called between the products.
        compiled: as of ``Pointwise``.
    """

    def __init__(self, config: Any, weights: Mapping[str, Tensor], libraries: Libraries, compiled: bool = True):
        c = self.c = config
        w = {name.removesuffix(".weight"): tensor for name, tensor in weights.items()}
        self.libraries = libraries
        first = ("q_a_proj", "kv_a_proj_with_mqa", "indexer.wk", "indexer.weights_proj")
        self.first_weight = torch.cat([w[name] for name in first])
        self.second_weight = torch.cat([w["q_b_proj"], w["indexer.wq_b"]])
        kv_b = w["kv_b_proj"].view(c.num_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        self.up_keys = kv_b[:, : c.qk_nope_head_dim]  # [H, N, L]
        self.up_values = kv_b[:, c.qk_nope_head_dim :].transpose(1, 2)  # [H, L, V]
        self.out_weight = w["o_proj"]
        key_norm = w["indexer.k_norm"].float(), weights["indexer.k_norm.bias"].float()
        self.norms = (w["q_a_layernorm"], w["kv_a_layernorm"], *key_norm)
        self.parts = Pointwise(config, compiled)

    # ---- the layer ---------------------------------------------------------------------------------------------------

    def _queries(self, x, cos, sin, slots, latents, keys) -> tuple[Tensor, Tensor, Tensor]:
        """Stores the rows' keys; (joined queries [T, H, L + R], index queries e4m3 [T, HI, D], weights [T, HI])."""
        c = self.c
        T, H, N, L = x.shape[0], c.num_heads, c.qk_nope_head_dim, c.kv_lora_rank
        a = linear(x, self.first_weight)
        q_lora, head_weights = self.parts.after_first(
            a, self.norms, cos, sin, slots, latents.view(-1, latents.shape[2]), keys.view(-1)
        )
        b = linear(q_lora, self.second_weight)
        joined = x.new_empty(T, H, L + c.qk_rope_head_dim)
        index_q, head_weights = self.parts.after_second(b, head_weights, cos, sin, joined[..., L:])
        q = b[:, : H * c.qk_head_dim].view(T, H, c.qk_head_dim)[..., :N]
        torch.bmm(q.transpose(0, 1), self.up_keys, out=joined[..., :L].transpose(0, 1))
        return joined, index_q, head_weights

    def _output(self, o: Tensor) -> Tensor:
        """[T, hidden] of attended latents [T, H, L]."""
        values = o.new_empty(*o.shape[:2], self.c.v_head_dim)
        torch.bmm(o.transpose(0, 1), self.up_values, out=values.transpose(0, 1))
        return linear(values.flatten(1), self.out_weight)

    def decode(self, x, cos, sin, slots, page_table, kv_len, latents, keys, plan) -> tuple[Tensor, Tensor]:
        """One row a request: (output [B, hidden], slots int32 [B, K] that were attended).

        Args:
            x: bf16 [B, hidden]; cos, sin: [B, R/2]; slots: int64 [B], where the rows' keys go.
            page_table: int32 [B, W]; kv_len: int32 [B], the new token included.
            latents: uint8 [P, 64, 656]; keys: uint8 [P, 64 D + 256].
            plan: ``libraries.plan(kv_len)``.
        """
        c = self.c
        joined, index_q, weights = self._queries(x, cos, sin, slots, latents, keys)
        scores = self.libraries.decode_scores(index_q, weights, keys, page_table, kv_len, plan)
        chosen = self.libraries.select(scores, kv_len, c.index_topk, page_table)
        o = self.libraries.decode_attention(joined, latents, chosen, c.scale, c.kv_lora_rank, plan)
        return self._output(o), chosen

    def prefill(self, x, cos, sin, slots, context_slots, visible, latents, keys) -> tuple[Tensor, Tensor]:
        """The last T tokens of one request: (output [T, hidden], positions int32 [T, K] that were attended).

        Args:
            context_slots: int64 [n], slots of all tokens of the request; visible: int32 [T]; others as in ``decode``.
        """
        c = self.c
        L, D = c.kv_lora_rank, c.index_head_dim
        joined, index_q, weights = self._queries(x, cos, sin, slots, latents, keys)
        groups = -(-L // GROUP)
        rows = latents.view(-1, latents.shape[2])
        views = (
            rows[:, :L].view(FP8),
            rows.view(torch.float32)[:, L // 4 : L // 4 + groups],
            rows.view(x.dtype)[:, (L + 4 * groups) // 2 :],
            keys[:, : PAGE * D].unflatten(1, (PAGE, D)),
            keys.view(torch.float32)[:, PAGE * D // 4 :],
        )
        gathered, codes, scales = self.parts.gathered(*views, context_slots)
        scores = self.libraries.prefill_scores(index_q, weights, codes.view(FP8), scales, visible)
        chosen = self.libraries.select(scores, visible, c.index_topk, None)
        count = visible.clamp(max=c.index_topk)
        return self._output(self.libraries.prefill_attention(joined, gathered, chosen, count, c.scale, L)), chosen


def runnable(composition: Composition, inputs: LayerInputs, graph: bool = True) -> Runnable:
    """A step as the benchmark runs it: decode as a replay of one CUDA graph, a prefill as it is.

    Args:
        graph: False: decode without a graph too, as on a CPU.

    Raises:
        ValueError: FlashMLA is known to fault at this size.
    """
    batch, pools, c = inputs.batch, inputs.pools, composition.c
    B = batch.kv_len.shape[0]
    flash_mla = composition.libraries.names["attention"] == "flash_mla"
    if batch.kind == DECODE and flash_mla and c.num_heads <= 64 < B:
        raise ValueError(f"FlashMLA's decode faults at {B} rows of {c.num_heads} heads (seen at 128)")
    rows = (inputs.x, inputs.cos, inputs.sin, batch.slots)
    caches = (pools.latents, pools.index_keys)
    if batch.kind == DECODE:
        plan = composition.libraries.plan(batch.kv_len)

        def step():
            return composition.decode(*rows, batch.page_table, batch.kv_len, *caches, plan)

        return Runnable(captured(step).replay if graph else step, step)
    context_slots = inputs.slots_of(0)

    def prefill():
        return composition.prefill(*rows, context_slots, batch.visible, *caches)

    def result():
        output, positions = prefill()
        slots = torch.where(positions >= 0, context_slots[positions.clamp(min=0).long()], -1)
        return output, slots

    return Runnable(prefill, result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(SIZES), default="deepseek_v32")
    parser.add_argument("--only", help="comma-separated parts of the names of cases (see --list)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, measure nothing")
    parser.add_argument("--topk", choices=TOPK, default="auto", help="auto: flashinfer where it is installed")
    parser.add_argument("--json", type=Path, help="write the records to this file after every case")
    parser.add_argument("--commit", help="the commit to record (default: that of the checkout)")
    args = parser.parse_args()
    cases = [case for case in selected(args.model, args.only) if case.level == LAYER]
    if not cases:
        parser.error(f"--only={args.only} is part of no case of a layer; --list prints them")
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    try:
        libraries = public_libraries(args.topk)
    except ImportError as error:
        parser.error(f"{error}; README.md says how the libraries are installed")
    console, config = Console(soft_wrap=True, highlight=False), layer_config(args.model)
    with torch.inference_mode():
        weights = random_layer(config, "cuda").state_dict()
        composition = Composition(config, weights, libraries)
        caches = Caches(config, max(case.batch * case.context for case in cases), "cuda")
        for case in cases:
            inputs = caches.inputs(case)
            try:
                work = runnable(composition, inputs)
            except ValueError as error:
                console.print(f"{case.name}: not run: {error}")
                continue
            accuracy = Oracle(config, weights, inputs).compare(*work.result())
            us, limit, started = device_us(work.run), case_limits(case).limit, launches(work.run)
            found = {
                "composition_us": us,
                "limit_us": limit,
                "launches": [launch.name for launch in started],
                "libraries": libraries.names,
            }
            found |= {"error": accuracy.error, "overlap": accuracy.overlap}
            keep(args.json, {"case": f"composition {case.name}", **found, **provenance(args.commit)})
            console.print(
                f"{case.name}: {us:,.1f} us, {len(started)} launches, limit {limit:,.1f} us; error "
                f"{accuracy.error:.1e}, overlap {accuracy.overlap:.4f}"
            )
            caches.restore(inputs.batch.slots)
            del work, inputs
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
