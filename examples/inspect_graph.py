"""Annotates an op of one's own and shows where graphs are cut: at it, and at the two prefill ops of a layer.

    python examples/inspect_graph.py
    python examples/inspect_graph.py --backend eager --device cpu

A block of one attention layer and one op of the user's is compiled piece by piece. The table has its parts in the order
in which they run; below it, the outputs for several numbers of tokens are compared with eager code.
"""

import argparse
import sys

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx

from compiled_dsa import Batch, DSAConfig, IndexFormat, PagePool, SparseAttention
from compiled_dsa.custom_ops.capture import split_op
from compiled_dsa.graphs.piecewise import Pieces, piecewise_backend
from compiled_dsa.graphs.split import split_graph, split_op_of
from compiled_dsa.graphs.torch_compat import mark_tokens_dynamic

TOKENS, VOCABULARY, MAX_LEN = (48, 7, 33), 512, 64
CONFIG = DSAConfig(
    hidden_size=128,
    num_heads=8,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    index_n_heads=64,
    index_head_dim=64,
    index_topk=16,
    index_format=IndexFormat(rope_interleaved=False),
    scale=48**-0.5,
)


# The annotation. What the op does cannot be part of a CUDA graph: it looks ids up in a table that stays on the host.
# Its arguments have one row a token, so a replay may hand it the real tokens only and fill the padding of ``out``.
@split_op("mine::fetch_rows", mutates_args=["out"], rows={"ids": None, "out": 0})
def fetch_rows(table: Tensor, ids: Tensor, out: Tensor) -> None:
    out.copy_(table[ids.to(table.device)])


WHY = {
    "mine": "reads a table in host memory (@split_op)",
    "compiled_dsa": "launches what the real rows need (split=True)",
}


class Block(torch.nn.Module):
    """Attention, then rows of a host table added to the residual."""

    def __init__(self, device: str):
        super().__init__()
        self.attention = SparseAttention(CONFIG, device=device)
        self.table = torch.randn(VOCABULARY, CONFIG.hidden_size)  # on the host, whatever the device

    def forward(self, x: Tensor, ids: Tensor, cos: Tensor, sin: Tensor, batch: Batch, pools) -> Tensor:
        attended, _ = self.attention(x, cos, sin, batch, pools)
        fetched = torch.empty_like(x)
        fetch_rows(self.table, ids, fetched)
        return x + attended + torch.tanh(fetched)


def prefill(tokens: int, device: str) -> tuple:
    """Arguments of ``Block`` for one request of ``tokens`` tokens and a fresh cache."""
    pool = PagePool(
        [CONFIG],
        num_pages=1,
        max_requests=1,
        max_len=MAX_LEN,
        latent_dtype=torch.float32,
        index_dtype=torch.float32,
        device=device,
    )
    pool.reserve(0, tokens)
    lengths = torch.tensor([tokens], device=device)
    batch = Batch.from_lengths(lengths, lengths, pool.page_table, tokens)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, CONFIG.hidden_size, generator=generator).to(device)
    ids = torch.randint(VOCABULARY, (tokens,), generator=generator).to(device)
    pairs = torch.arange(CONFIG.qk_rope_head_dim // 2, device=device)
    angles = batch.positions.unsqueeze(1) * 1e4 ** (-2 * pairs / CONFIG.qk_rope_head_dim)
    arguments = x, ids, angles.cos(), angles.sin(), batch, pool.layers[0]
    for rows in (*arguments[:4], batch.positions, batch.slots, batch.req_of_row, batch.visible):
        mark_tokens_dynamic(rows, 0)
    return arguments


def parts_table(split: fx.GraphModule, backend: str) -> Table:
    table = Table(title="Where the graph is cut")
    for column in ("part", "runs as", "what", "why it is cut"):
        table.add_column(column, no_wrap=column == "what")
    for name, part in split.named_children():
        calls = [node for node in part.graph.nodes if node.op in ("call_function", "call_method")]
        op = next((op for op in map(split_op_of, calls) if op is not None), None)
        if op is None:
            table.add_row(name, f"compiled by {backend}", f"{len(calls)} calls, {calls[0].name} to {calls[-1].name}")
        else:
            table.add_row(name, "called as it is", op.name(), WHY[op.namespace], style="bold")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor", help="what compiles the pieces (default: inductor)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    torch.manual_seed(0)
    block = Block(args.device)
    graphs, pieces = [], Pieces()

    def backend(graph_module: fx.GraphModule, example_inputs: list):
        graphs.append(split_graph(graph_module))  # to look at; the next line cuts for itself
        return piecewise_backend(args.backend, pieces)(graph_module, example_inputs)

    compiled = torch.compile(block, backend=backend, fullgraph=True)
    worst = 0.0
    with torch.no_grad():
        for tokens in TOKENS:
            out, expected = compiled(*prefill(tokens, args.device)), block(*prefill(tokens, args.device))
            worst = max(worst, float((out - expected).abs().max()))
    console.print(parts_table(graphs[0], args.backend))
    console.print(f"pieces: {pieces.pieces}; cuts: {', '.join(pieces.cuts)}")
    console.print(f"compiles: {len(graphs)}, for {', '.join(map(str, TOKENS))} tokens")
    console.print(f"largest difference from eager code: {worst:.1e}")
    return 0 if worst < 1e-3 and len(graphs) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
