"""A continuous-batching loop of your own over a model compiled by ``compile_model``.

    python examples/serve_loop.py --model deepseek_v32
    python examples/serve_loop.py --model glm_moe_dsa --device cuda --requests 64 --rate 200

Requests arrive at random times, with prompts of random lengths. Each step computes the rows that the scheduler picks
(scheduler.py): one for each request that generates, and chunks of prompts. Steps of single rows are decode-shaped and
replay full CUDA graphs on a GPU; those with a chunk replay breakable ones. After the warm-up a compile, or a step
without its graph, ends the run.

The model is a small random one, built by transformers' own classes. At the end every request is generated once more,
alone, by ``generate()`` of the untouched model. The last line is ``identical tokens: N/N``; the exit status is 1 when
tokens differ.
"""

import argparse
import copy
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.progress import track
from rich.table import Table
from scheduler import Chunk, Request, Scheduler
from served_model import ServedModel
from torch import Tensor
from transformers import PreTrainedModel

from compiled_dsa import Batch, PagePool, compile_model
from compiled_dsa.batch import DECODE, PREFILL
from compiled_dsa.compile import RUNTIMES
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.huggingface.small_models import MODELS, SMALL, model_config, random_model
from compiled_dsa.steps import prefill_batch_sizes

PROMPT, NEW_TOKENS = (8, 200), (4, 40)  # shortest and longest
MAX_LEN = PROMPT[1] + NEW_TOKENS[1]
console = Console(soft_wrap=True, highlight=False)


def make_batch(chunks: list[Chunk], pool: PagePool, index_topk: int) -> tuple[Tensor, Batch]:
    """Token ids [T] and the ``Batch`` of a step.

    torch compiles code of its own for sizes of 1: a step of one request gets a second one without keys, and a row of
    padding when it has one row.
    """
    device = pool.page_table.device
    idle = max(0, 2 - len(chunks))
    q_len = [chunk.rows for chunk in chunks] + [0] * idle
    kv_len = [chunk.kv_len for chunk in chunks] + [0] * idle
    ids = [token for chunk in chunks for token in chunk.ids]
    ids += [0] * max(0, 2 - len(ids))
    table_rows = [chunk.request.row for chunk in chunks] + [0] * idle
    q_len_on_device, kv_len_on_device, rows_on_device = torch.tensor([q_len, kv_len, table_rows], device=device)
    batch = Batch.from_lengths(
        q_len_on_device,
        kv_len_on_device,
        pool.page_table[rows_on_device],
        len(ids),
        kind=DECODE if max(q_len) == 1 else PREFILL,
        skip_scores=max(kv_len) <= index_topk,
    )
    return torch.tensor(ids, device=device), batch


@dataclass
class Times:
    """Of a request, in seconds after the start."""

    arrival: float
    first_token: float | None = None
    end: float | None = None


class Server:
    """The loop, and what it measures.

    Args:
        arrivals: seconds after the start at which each request arrives, in ascending order.
    """

    def __init__(self, model: ServedModel, pool: PagePool, scheduler: Scheduler, arrivals: dict[Request, float]):
        self._model, self._pool, self._scheduler = model, pool, scheduler
        self._index_topk = model.configs[0].index_topk
        self._times = {request: Times(seconds) for request, seconds in arrivals.items()}
        self._steps: Counter[str] = Counter()
        self._rows, self._seconds = 0, 0.0

    def run(self) -> Iterator[Request]:
        """Serves all requests; yields each when it has its last token."""
        start = time.perf_counter()
        coming = deque(self._times)
        while coming or self._scheduler.busy:
            now = time.perf_counter() - start
            while coming and self._times[coming[0]].arrival <= now:
                self._scheduler.add(coming.popleft())
            if not self._scheduler.busy:
                time.sleep(self._times[coming[0]].arrival - now)
                continue
            chunks = self._scheduler.schedule()
            finished = self._scheduler.advance(chunks, self._step(chunks))
            now = self._seconds = time.perf_counter() - start
            for times in (self._times[chunk.request] for chunk in chunks if chunk.request.generated):
                times.first_token = times.first_token or now
            for request in finished:
                self._times[request].end = now
                yield request

    def view(self) -> Table:
        """The requests that run, and the tokens that they have so far."""
        waiting = len(self._scheduler.waiting)
        table = Table("request", "keys", "tokens", title=f"{waiting} waiting, {self._pool.free_pages} pages free")
        for request in list(self._scheduler.running):
            tokens = " ".join(map(str, request.generated[-12:]))
            table.add_row(request.name, f"{request.held}/{request.most_keys}", tokens)
        return table

    def figures(self) -> dict[str, Any]:
        """Of the whole run."""
        new_tokens = sum(request.new_tokens for request in self._times)
        times = self._times.items()
        return {
            "new_tokens": new_tokens,
            "seconds": self._seconds,
            "tokens_per_s": new_tokens / self._seconds,
            "first_token_s": percentiles(t.first_token - t.arrival for _, t in times),
            "next_token_s": percentiles((t.end - t.first_token) / (r.new_tokens - 1) for r, t in times),
            "steps": dict(self._steps),
            "rows": self._rows,
            "preemptions": sum(request.preemptions for request in self._times),
        }

    @torch.no_grad()
    def _step(self, chunks: list[Chunk]) -> list[int]:
        """The most probable token after each chunk."""
        ids, batch = make_batch(chunks, self._pool, self._index_topk)
        logits = self._model(ids, batch, self._pool)  # [T, vocabulary]
        last_rows = batch.q_start[1 : len(chunks) + 1].long() - 1
        self._steps[f"{batch.kind}, {'all keys' if batch.skip_scores else 'sparse'}"] += 1
        self._rows += sum(chunk.rows for chunk in chunks)
        return logits[last_rows].argmax(-1).tolist()  # here the host waits for the device, once a step


@torch.no_grad()
def warm_up(model: ServedModel, pool: PagePool, token_sizes: list[int], batch_sizes: list[int], *, quiet: bool) -> None:
    """Compiles, and on a GPU captures, all that the loop will call: batches in which nothing is to be done will do."""
    device, pages = pool.page_table.device, pool.page_table.shape[1]

    def run(rows: int, requests: int, kind: str) -> None:
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        for skip_scores in (True, False):
            model(ids, Batch.idle(rows, requests, pages, device, kind=kind, skip_scores=skip_scores), pool)

    def prefill(rows: int) -> None:
        # the fewest requests of each bucket: with as many requests as rows, torch would compile for that equality where
        # nothing is padded
        for requests in (batch_sizes[0], *(size + 1 for size in prefill_batch_sizes(batch_sizes)[:-1])):
            run(rows, requests, PREFILL)

    model.warm_up(prefill, token_sizes, progress=not quiet)
    model.warm_up(lambda requests: run(requests, requests, DECODE), batch_sizes, progress=not quiet)
    model.end_warm_up()


def doubled(smallest: int, largest: int) -> list[int]:
    """smallest, twice that, ... and largest."""
    sizes = [smallest]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    return sizes


def random_requests(args: argparse.Namespace, vocab_size: int) -> dict[Request, float]:
    """Requests and the seconds at which they arrive: a Poisson process, ``args.rate`` a second."""
    rng, seconds, arrivals = random.Random(args.seed), 0.0, {}
    for i in range(args.requests):
        seconds += rng.expovariate(args.rate)
        prompt = [rng.randrange(1, vocab_size) for _ in range(rng.randint(*PROMPT))]
        arrivals[Request(str(i), prompt, rng.randint(*NEW_TOKENS))] = seconds
    return arrivals


def same_tokens(stock: PreTrainedModel, requests: Iterable[Request]) -> int:
    """How many tokens are those that the untouched model generates for the prompts, each alone."""
    same = 0
    for request in requests:
        prompt = torch.tensor([request.prompt], device=stock.device)
        generated = stock.generate(prompt, max_new_tokens=request.new_tokens, do_sample=False)
        pairs = zip(request.generated, generated[0, len(request.prompt) :].tolist(), strict=True)
        equal = [token == expected for token, expected in pairs]
        if not all(equal):
            console.print(f"request {request.name} differs from its new token {equal.index(False)} on")
        same += sum(equal)
    return same


def percentiles(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": ordered[len(ordered) * p // 100] for p in (50, 90, 99)}


def serve(args: argparse.Namespace) -> int:
    """Serves, reports and compares; returns the exit status."""
    if args.device == "cpu":
        torch.set_num_threads(1)  # tensors are tiny: on a busy machine more threads wait a second a step for each other
    # transformers' experts synchronise with the host in fp32, which no CUDA graph can hold: dense MLPs on a GPU
    dense = args.layers if args.device == "cuda" else 1
    config = model_config(args.model, args.layers, first_k_dense_replace=dense, **SMALL)
    stock = random_model(config, seed=args.seed, device=args.device, dtype=torch.float32)

    token_budget = max(2 * args.chunk, args.max_batch)
    token_sizes, batch_sizes = doubled(min(16, token_budget), token_budget), doubled(2, args.max_batch)
    model = compile_model(
        ServedModel(copy.deepcopy(stock)),
        args.graphs,
        batch_sizes=batch_sizes,
        token_sizes=token_sizes,
        max_cache_len=MAX_LEN,
        on_miss="raise",
        backend=args.backend,
    )
    # half of what the largest requests would need, so that some have to wait
    pool = model.make_pool(args.max_batch // 2 * -(-MAX_LEN // PAGE), args.max_batch, MAX_LEN)
    start = time.perf_counter()
    warm_up(model, pool, token_sizes, batch_sizes, quiet=args.quiet)
    warm_up_s, warm = time.perf_counter() - start, model.graph_stats()

    arrivals = random_requests(args, config.vocab_size)
    scheduler = Scheduler(pool, max_batch=args.max_batch, chunk=args.chunk, token_budget=token_budget)
    server = Server(model, pool, scheduler, arrivals)
    with nullcontext() if args.quiet else Live(get_renderable=server.view, console=console, transient=True):
        for request in server.run():
            if not args.quiet:
                tokens = " ".join(map(str, request.generated))
                console.print(f"request {request.name}: {len(request.prompt)} + {request.new_tokens} tokens: {tokens}")
    graphs = model.graph_stats()

    given = {name: getattr(args, name) for name in ("model", "device", "layers", "requests", "rate", "max_batch",
                                                    "chunk", "seed", "backend")}  # fmt: skip
    warmth = {"warm_up_s": warm_up_s, "captured_later": graphs["captured"] - warm["captured"], "graph_stats": graphs}
    stats = given | {"torch": torch.__version__} | server.figures() | warmth
    report(stats)
    same = same_tokens(stock, track(arrivals, "stock transformers", console=console, transient=True,
                                    disable=args.quiet))  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(stats | {"identical_tokens": same}, indent=1) + "\n")
    console.print(f"identical tokens: {same}/{stats['new_tokens']}")
    return 0 if same == stats["new_tokens"] else 1


def report(stats: dict[str, Any]) -> None:
    graphs = stats["graph_stats"]
    steps = "; ".join(f"{count} {name}" for name, count in sorted(stats["steps"].items()))
    console.print(f"{stats['requests']} requests in {stats['seconds']:.2f} s, {stats['tokens_per_s']:.1f} tokens/s")
    for name, key in (("first token", "first_token_s"), ("each next", "next_token_s")):
        console.print(f"{name}: " + ", ".join(f"{p} {1000 * s:.1f} ms" for p, s in stats[key].items()))
    console.print(f"steps: {steps}; {stats['rows']} rows; preemptions: {stats['preemptions']}")
    console.print(f"warm-up: {stats['warm_up_s']:.1f} s; compiled: {graphs['compiles']}, later: {graphs['recompiles']}")
    console.print(
        f"CUDA graphs: {graphs['graphs']}; captured: {graphs['captured']}, later: {stats['captured_later']}; replayed: "
        f"{graphs['replayed']} in {graphs['replayed_segments']} segments and {graphs['replayed_breaks']} breaks; "
        f"memory: {graphs['pool_bytes'] / 2**20:.1f} MiB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rate", type=float, default=20.0, help="requests that arrive in a second, on average")
    parser.add_argument("--max-batch", type=int, default=8, help="requests that run at once")
    parser.add_argument("--chunk", type=int, default=32, help="most rows of a prompt in a step, of twice that in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graphs", choices=RUNTIMES, default="auto", help="as in compile_model")
    parser.add_argument("--backend", default="inductor", help="torch.compile's; eager starts sooner")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--quiet", action="store_true", help="the figures only")
    args = parser.parse_args()
    for name, least in (("layers", 1), ("requests", 1), ("max_batch", 2), ("chunk", 2)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')}={getattr(args, name)}; it must be at least {least}")
    if not args.rate > 0:
        parser.error(f"--rate={args.rate}; it must be above 0")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: torch sees no GPU")
    return serve(args)


if __name__ == "__main__":
    sys.exit(main())
