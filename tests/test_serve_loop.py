"""The scheduler of examples/serve_loop.py, without a model; then the example itself, small."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_dsa import Batch, PagePool
from compiled_dsa.batch import DECODE, PREFILL
from compiled_dsa.custom_ops.layout import PAGE
from compiled_dsa.graphs.buckets import Buckets
from compiled_dsa.steps import Planner
from examples.scheduler import Chunk, Request, Scheduler

ROOT = Path(__file__).parents[1]


def make_pool(pages: int, max_requests: int, max_len: int = 64 * PAGE) -> PagePool:
    """The books of pages, without layers."""
    dtypes = {"latent_dtype": torch.float32, "index_dtype": torch.float32}
    return PagePool([], num_pages=pages, max_requests=max_requests, max_len=max_len, device="cpu", **dtypes)


def request(name: str, prompt: int, new_tokens: int) -> Request:
    return Request(name, [(7 * i + len(name)) % 50 for i in range(prompt)], new_tokens)


def following(tokens: list[int]) -> int:
    """A model: the next token depends on each token and its place."""
    return sum((i + 1) * token for i, token in enumerate(tokens)) % 97


def expected(prompt: list[int], new_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


class Loop:
    """Serves with the model above, whose memory is what the pages hold, and checks each step."""

    def __init__(self, scheduler: Scheduler, pool: PagePool, chunk: int, token_budget: int):
        self.scheduler, self.pool, self.chunk, self.token_budget = scheduler, pool, chunk, token_budget
        self.memory: dict[int, int] = {}  # physical slot -> token
        self.steps: list[list[tuple[str, int]]] = []

    def step(self) -> list[Request]:
        chunks = self.scheduler.schedule()
        self.check(chunks)
        self.steps.append([(chunk.request.name, chunk.rows) for chunk in chunks])
        return self.scheduler.advance(chunks, [self.compute(chunk) for chunk in chunks])

    def compute(self, chunk: Chunk) -> int:
        pages = self.pool.pages_of(chunk.request.row)
        slots = [pages[i // PAGE] * PAGE + i % PAGE for i in range(chunk.kv_len)]
        self.memory.update(zip(slots[chunk.request.held :], chunk.ids, strict=True))
        return following([self.memory[slot] for slot in slots])

    def check(self, chunks: list[Chunk]) -> None:
        assert chunks and sum(chunk.rows for chunk in chunks) <= self.token_budget
        assert all(1 <= chunk.rows <= self.chunk for chunk in chunks)
        names = [chunk.request.name for chunk in chunks]
        assert len(set(names)) == len(names)
        decoding = {r.name for r in self.scheduler.running if r.decoding}
        assert decoding <= set(names)
        pages = [page for r in self.scheduler.running for page in self.pool.pages_of(r.row)]
        assert len(set(pages)) == len(pages)


def make_loop(pages: int = 8, max_batch: int = 3, chunk: int = 16, token_budget: int = 24) -> Loop:
    pool = make_pool(pages, max_batch)
    scheduler = Scheduler(pool, max_batch=max_batch, chunk=chunk, token_budget=token_budget)
    return Loop(scheduler, pool, chunk, token_budget)


def test_prompts_are_chunked_within_the_budget_beside_decodes():
    loop = make_loop()
    loop.scheduler.add(request("a", 20, 4))
    loop.scheduler.add(request("b", 40, 2))
    while loop.scheduler.busy:
        loop.step()
    assert loop.steps == [
        [("a", 16), ("b", 8)],  # a chunk each, of the budget of 24
        [("a", 4), ("b", 16)],
        [("a", 1), ("b", 16)],
        [("a", 1), ("b", 1)],
        [("a", 1)],
    ]


def test_a_short_end_of_a_prompt_counts_as_a_token():
    loop = make_loop(chunk=8)
    loop.scheduler.add(request("a", 9, 1))
    while loop.scheduler.busy:
        loop.step()
    assert loop.steps == [[("a", 8)], [("a", 1)]]


def test_pages_grow_with_a_request_and_return_when_it_is_done():
    loop = make_loop(pages=3)
    loop.scheduler.add(request("a", PAGE - 1, 3))
    free = []
    while loop.scheduler.busy:
        loop.step()
        free.append(loop.pool.free_pages)
    assert free == [2] * 5 + [3]
    assert loop.scheduler.running == []


def test_admission_waits_for_pages_and_nobody_overtakes():
    loop = make_loop(pages=4)
    for each in (request("a", 2 * PAGE, 4), request("b", 2 * PAGE, 4), request("c", 2, 2)):
        loop.scheduler.add(each)
    loop.step()
    assert [r.name for r in loop.scheduler.running] == ["a"]  # b would leave none for a to grow
    assert [r.name for r in loop.scheduler.waiting] == ["b", "c"]  # c has room, but came later
    finished = []
    while loop.scheduler.busy:
        finished += loop.step()
    assert {r.name for r in finished} == {"a", "b", "c"} and loop.pool.free_pages == 4


def test_the_youngest_yields_and_loses_no_token():
    loop = make_loop(pages=4, max_batch=2, chunk=PAGE, token_budget=2 * PAGE)
    old, young = request("old", 30, 150), request("young", 30, 150)
    for each in (old, young):
        loop.scheduler.add(each)
    finished = []
    while loop.scheduler.busy:
        finished += [r.name for r in loop.step()]
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert finished == ["old", "young"]
    for each in (old, young):
        assert each.generated == expected(each.prompt, 150)
    assert loop.pool.free_pages == 4


LENGTHS = st.tuples(st.integers(1, 3 * PAGE), st.integers(1, PAGE + 10), st.integers(0, 30))


@settings(deadline=None)
@given(
    st.lists(LENGTHS, min_size=1, max_size=8),  # prompt, new tokens, steps after the one before
    st.integers(5, 12),
    st.integers(1, 4),
    st.integers(1, 70),
    st.integers(0, 70),
)
def test_any_schedule_of_arrivals_finishes_and_leaves_all_pages_free(lengths, pages, max_batch, chunk, more):
    loop = make_loop(pages, max_batch, chunk, max_batch + more)
    requests = [request(str(i), prompt, new_tokens) for i, (prompt, new_tokens, _) in enumerate(lengths)]
    finished: list[Request] = []
    for each, (_, _, steps) in zip(requests, lengths):
        for _ in range(steps):
            if loop.scheduler.busy:
                finished += loop.step()
        loop.scheduler.add(each)
    while loop.scheduler.busy:
        finished += loop.step()
        assert [*loop.scheduler.running, *loop.scheduler.waiting] == [r for r in requests if r not in finished]
    assert loop.pool.free_pages == pages
    assert sorted(r.name for r in finished) == sorted(r.name for r in requests)
    for each in requests:
        assert each.generated == expected(each.prompt, each.new_tokens)
    assert requests[0].preemptions == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("long", 5 * PAGE, 2), "request long needs 321 keys; the pool holds at most 320"),
        (request("mute", 5, 0), "request mute: 5 prompt and 0 new tokens"),
        (request("empty", 0, 5), "request empty: 0 prompt and 5 new tokens"),
    ],
)
def test_what_can_never_run_is_refused_by_name(bad, message):
    loop = make_loop(pages=5)
    with pytest.raises(ValueError, match=message):
        loop.scheduler.add(bad)
    loop.scheduler.add(request("fits", 5 * PAGE, 1))
    assert not bad.generated and [r.name for r in loop.scheduler.waiting] == ["fits"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch=0"),
        ({"chunk": 0}, "chunk=0"),
        ({"max_batch": 4, "token_budget": 3}, "token_budget=3; it must be at least max_batch=4"),
    ],
)
def test_bad_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(make_pool(8, 4), **{"max_batch": 3, "chunk": 16, "token_budget": 24, **options})


# ---- the example -----------------------------------------------------------------------------------------------------


class Planned:
    """In place of a compiled model: notes which graph each call would be served by."""

    def __init__(self, token_sizes: list[int], batch_sizes: list[int]):
        self._planner = Planner(Buckets("token_sizes", token_sizes), Buckets("batch_sizes", batch_sizes), 256)
        self.graphs: set[tuple] = set()

    def __call__(self, ids: torch.Tensor, batch: Batch, pool: PagePool) -> None:
        kind, step = self._planner.plan((ids, batch), {})
        self.graphs.add((kind, batch.skip_scores, step.bucket))

    def warm_up(self, run, sizes, *, progress: bool) -> None:
        for size in sizes:
            run(size)

    def end_warm_up(self) -> None:
        self.warm = set(self.graphs)


@pytest.mark.parametrize(("max_batch", "chunk"), [(2, 1), (4, 2), (8, 16), (16, 16), (20, 32), (32, 16), (100, 32)])
def test_the_warm_up_meets_every_graph_of_the_loop(max_batch, chunk, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("serve_loop")
    token_budget = max(2 * chunk, max_batch)
    token_sizes = example.doubled(min(16, token_budget), token_budget)
    batch_sizes = example.doubled(2, max_batch)
    model, pool = Planned(token_sizes, batch_sizes), make_pool(4, max_batch, 4 * PAGE)
    example.warm_up(model, pool, token_sizes, batch_sizes, quiet=True)
    for requests in range(2, max_batch + 1):
        steps = [(requests, DECODE), *((rows, PREFILL) for rows in range(requests, token_budget + 1))]
        for rows, kind in steps:
            for skip_scores in (True, False):
                batch = Batch.idle(rows, requests, 4, "cpu", kind=kind, skip_scores=skip_scores)
                model(torch.zeros(rows, dtype=torch.int64), batch, pool)
    assert model.graphs == model.warm


def serve(folder: Path, *options: str) -> dict:
    """The figures of a run in which all tokens were those of the stock model."""
    figures = folder / "figures.json"
    command = [sys.executable, "examples/serve_loop.py", "--json", str(figures), *options]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    stats = json.loads(figures.read_text())
    same = stats["identical_tokens"]
    assert same == stats["new_tokens"] > 0
    assert done.stdout.splitlines()[-1] == f"identical tokens: {same}/{same}"
    assert stats["graph_stats"]["recompiles"] == 0 and stats["captured_later"] == 0
    return stats


def test_example_on_a_cpu(tmp_path):
    small = ("--layers", "1", "--requests", "3", "--max-batch", "2", "--chunk", "16", "--backend", "eager", "--quiet")
    stats = serve(tmp_path, "--device", "cpu", *small)
    graphs, warm_up = stats["graph_stats"], 2 * (2 + 1)  # with and without scores: 16 and 32 rows; 2 requests
    assert graphs["graphs"] == "off"
    assert graphs["uncaptured"] == sum(stats["steps"].values()) + warm_up


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa"])
def test_example_on_a_gpu_replays_graphs(model, tmp_path):
    stats = serve(tmp_path, "--device", "cuda", "--model", model, "--rate", "100")
    graphs, warm_up = stats["graph_stats"], 2 * (3 + 3)  # with and without scores: 16, 32, 64 rows; 2, 4, 8 requests
    assert graphs["graphs"] == "auto" and graphs["uncaptured"] == 0
    assert graphs["captured"] == warm_up
    assert graphs["replayed"] == sum(stats["steps"].values()) + warm_up
    assert graphs["replayed_breaks"] > 0
