"""Padding to buckets, without graphs: a padded forward on static buffers gives what the forward itself gives."""

import functools
from dataclasses import replace

import pytest
import torch

from compiled_dsa import PagePool, compile_model
from compiled_dsa.batch import DECODE, MAX_DECODE_TOKENS, PREFILL, Batch
from compiled_dsa.compile import _Forwards
from compiled_dsa.graphs.buckets import BATCH_SIZES, TOKEN_SIZES, Buckets
from compiled_dsa.graphs.buffers import Call, StaticInputs
from compiled_dsa.graphs.runner import MAX_CALLS
from compiled_dsa.huggingface import PagedCache
from compiled_dsa.steps import NoBucket, Planner
from tests.huggingface.tiny_models import MODEL_TYPES, left_padding, prompt, small_pair
from tests.modules.layers import angles, our_layer, stock_layer


def planner(max_cache_len: int | None = None) -> Planner:
    return Planner(Buckets("token_sizes", (16, 48, 64, 96)), Buckets("batch_sizes", (2, 4)), max_cache_len)


def run_padded(forward, step):
    """What a runner does, without a graph: fill the buffers of the bucket, run, crop."""
    if step.bucket is None:
        return forward(*step.args, **step.kwargs)
    call = Call(step.args, step.kwargs, step.bucket)
    inputs = StaticInputs(Call(*step.idle(), bucket=step.bucket))
    inputs.fill(call)
    args, kwargs = inputs.arguments(call)
    return torch.utils._pytree.tree_map_only(torch.Tensor, step.crop, forward(*args, **kwargs))


def pad_forwards(model) -> list[tuple[str, object]]:
    """Pads every forward of a transformers model from now on; returns the list of (kind, bucket) that it fills."""
    forward, seen, plan = model.forward, [], planner()

    @functools.wraps(forward)  # generate() looks at the signature
    def padded(*args, **kwargs):
        try:
            kind, step = plan.plan(args, kwargs)
        except NoBucket as reason:
            seen.append(("none", str(reason)))
            return forward(*args, **kwargs)
        seen.append((kind, step.bucket))
        return run_padded(forward, step)

    model.forward = padded
    return seen


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_generation_through_buckets_is_that_of_the_stock_model(model_type):
    pair = small_pair(model_type)
    seen = pad_forwards(pair.ours)
    for batch_size, length, mask in ((1, 20, None), (2, 20, None), (2, 40, left_padding(2, 40)), (2, 70, None)):
        ids = prompt(batch_size, length)
        options = {"do_sample": False, "max_new_tokens": 5, "attention_mask": mask}
        cache = PagedCache(pair.config, batch_size, 80)
        got = pair.ours.generate(ids, past_key_values=cache, **options)
        assert torch.equal(got, pair.stock.generate(ids, **options))
        assert cache.get_seq_length() == length + 4 == int(cache.columns_on_device())
    prefills = [bucket for kind, bucket in seen if kind != DECODE]
    assert prefills == [(1, 48, 1), (2, 48, 1), (2, 48, 1), "more than 96 tokens"]
    assert [kind for kind, _ in seen].count(DECODE) == 16


def test_outputs_are_cropped_and_chunks_follow_each_other():
    pair = small_pair("deepseek_v32")
    ids = prompt(2, 60)
    with torch.no_grad():
        want = pair.stock(ids, output_hidden_states=True)
        seen = pad_forwards(pair.ours)
        cache = PagedCache(pair.config, 2, 80)
        parts = [pair.ours(ids[:, part], past_key_values=cache, output_hidden_states=True)
                 for part in (slice(0, 30), slice(30, 41), slice(41, 60))]  # fmt: skip
    assert [bucket for _, bucket in seen] == [(2, 48, None), (2, 16, None), (2, 48, None)]
    torch.testing.assert_close(torch.cat([p.logits for p in parts], 1), want.logits, rtol=1e-4, atol=1e-4)
    hidden = torch.cat([p.hidden_states[1] for p in parts], 1)
    torch.testing.assert_close(hidden, want.hidden_states[1], rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 60


def test_padding_stores_nothing():
    pair = small_pair("deepseek_v32")
    pad_forwards(pair.ours)
    cache = PagedCache(pair.config, 1, 80)
    cache.allocate("cpu", torch.float32)
    for layer in cache.pool.layers:
        for pool in layer.tensors():
            pool.fill_(torch.nan)
    with torch.no_grad():
        pair.ours(prompt(1, 20), past_key_values=cache)
    page = int(cache.pool.page_table[0, 0])
    for layer in cache.pool.layers:
        assert layer.latents[page, :20].isfinite().all() and layer.latents[page, 20:].isnan().all()
        written = layer.latents.isfinite().all(-1)
        assert int(written.sum()) == 20


def lengths(q_len, kv_len, rows, kind=PREFILL, columns=2) -> Batch:
    table = torch.arange(len(q_len) * columns, dtype=torch.int32).view(len(q_len), columns)
    q_len, kv_len = (torch.tensor(x, dtype=torch.int64) for x in (q_len, kv_len))
    return Batch.from_lengths(q_len, kv_len, table, rows, kind=kind)


def test_a_batch_is_padded_in_rows_requests_and_pages():
    batch = lengths([3, 2], [10, 4], 5)
    ids = torch.arange(1, 6)
    kind, step = planner(max_cache_len=256).plan((ids,), {"batch": batch})
    assert (kind, step.bucket, step.rows, step.padded_rows) == (PREFILL, (16, 4, ((16,),)), 5, 16)
    padded_ids, padded = run_padded(lambda ids, batch: (ids, batch), step)
    assert padded_ids.tolist() == [1, 2, 3, 4, 5]  # cropped
    call = Call(step.args, step.kwargs, step.bucket)
    inputs = StaticInputs(Call(*step.idle(), bucket=step.bucket))
    for _ in range(2):
        inputs.fill(call)
        (ids,), kwargs = inputs.arguments(call)
        held = kwargs["batch"]
        assert ids.tolist() == [1, 2, 3, 4, 5] + [0] * 11
        assert held.visible.tolist() == [8, 9, 10, 3, 4] + [0] * 11
        assert held.slots.tolist() == batch.slots.tolist() + [-1] * 11
        assert held.req_of_row.tolist() == [0, 0, 0, 1, 1] + [0] * 11
        assert held.q_start.tolist() == [0, 3, 5, 5, 5] and held.kv_len.tolist() == [10, 4, 0, 0]
        assert held.page_table.tolist() == [[0, 1, -1, -1], [2, 3, -1, -1]] + [[-1] * 4] * 2
        for tensor in (ids, held.visible, held.page_table, held.slots):
            tensor.fill_(77)  # what a call leaves in a buffer is gone after the next filling
    assert torch.equal(batch.visible, torch.tensor([8, 9, 10, 3, 4], dtype=torch.int32))  # the caller's is untouched


def test_a_decode_batch_is_padded_to_whole_requests():
    _, step = planner().plan((lengths([2, 2, 2], [9, 5, 70], 6, DECODE),), {})
    assert (step.bucket, step.rows, step.padded_rows) == ((8, 4, ()), 6, 8)


def test_kinds_of_batches_are_counted():
    plan, keys = planner(max_cache_len=256), set()
    for skip_scores in (False, True):
        for requests in range(1, 5):
            q_lens = [([tokens] * requests, DECODE) for tokens in range(1, MAX_DECODE_TOKENS + 1)]
            q_lens += [([1] * (requests - 1) + [rows + 1 - requests], PREFILL) for rows in range(requests, 97)]
            for q_len, kind in q_lens:
                batch = replace(lengths(q_len, q_len, sum(q_len), kind), skip_scores=skip_scores)
                _, step = plan.plan((batch,), {})
                keys.add(Call(step.args, step.kwargs, step.bucket).key)
    assert len(keys) == plan.batch_kinds


@pytest.mark.parametrize("graphs", ["auto", "full"])
def test_graphs_of_all_kinds_of_batches_are_held(graphs):
    plan = Planner(Buckets("token_sizes", TOKEN_SIZES), Buckets("batch_sizes", BATCH_SIZES), 256)
    forwards = _Forwards(torch.nn.Identity(), "eager", graphs, True, plan, "warn")
    assert all(runner.max_calls >= plan.batch_kinds > MAX_CALLS for runner in forwards.runners.values())


@pytest.mark.parametrize(
    ("q_len", "kind", "rows", "requests"),
    [([3, 2], PREFILL, 16, 4), ([1, 1], PREFILL, 16, 4), ([1, 1, 1], DECODE, 4, 4), ([2, 2, 2], DECODE, 8, 4)],
)
def test_tensors_of_rows_and_of_requests_are_padded_and_cropped(q_len, kind, rows, requests):
    T, B = sum(q_len), len(q_len)
    per_row, per_request, other = torch.rand(T), torch.rand(B, 3), torch.rand(7)
    seen = []

    def forward(batch, per_row, per_request, other):
        seen.extend(t.shape[0] for t in (batch.visible, batch.kv_len, per_row, other))
        return per_row * 2, per_request * 2, other * 2

    _, step = planner().plan((lengths(q_len, [9] * B, T, kind), per_row, per_request, other), {})
    got = run_padded(forward, step)
    assert seen == [rows, requests, rows, 7]
    for result, given in zip(got, (per_row, per_request, other)):
        assert torch.equal(result, given * 2)


def test_rows_and_requests_are_told_apart_by_their_sizes():
    plan = Planner(Buckets("token_sizes", (4,)), Buckets("batch_sizes", (4,)), None)
    _, step = plan.plan((lengths([2, 1], [5, 5], 3),), {})
    assert step.bucket[:2] == (4, 5)
    got = run_padded(lambda batch: (batch.visible, batch.kv_len), step)
    assert [t.shape[0] for t in got] == [3, 2]


def test_calls_that_pad_other_arguments_do_not_share_a_graph():
    def key(weights: int):
        batch = lengths([3, 2], [10, 4], 5)
        return planner().plan((batch, torch.zeros(weights, 2)), {})[1].bucket

    assert key(7) == key(7) != key(8)
    assert key(5) != key(7)


def test_a_wider_page_table_is_refused():
    plan = planner(max_cache_len=128)
    _, step = plan.plan((lengths([3], [3], 3, columns=3),), {})
    with pytest.raises(ValueError, match=r"page_table is torch.int32 \(1, 3\).*room for torch.int32 \(4, 2\)"):
        run_padded(lambda batch: batch, step)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (lengths([1] * 5, [1] * 5, 5, DECODE), "more than 4 requests"),
        (lengths([97], [97], 97, columns=2), "more than 96 rows"),
        (lengths([], [], 0), "no rows"),
        (Batch.idle(0, 0, 1, "cpu", kind=DECODE, skip_scores=True), "no rows"),
        (lengths([2, 1], [2, 1], 3, DECODE), "3 rows of 2 requests"),
    ],
)
def test_what_fits_no_bucket_says_why(batch, reason):
    with pytest.raises(NoBucket, match=reason):
        planner().plan((batch,), {})


@pytest.mark.parametrize("kind", [DECODE, PREFILL])
@pytest.mark.parametrize("q_len", [[], [0], [0, 0], [0, 0, 0]], ids=len)
@pytest.mark.parametrize("skip_scores", [False, True])
def test_no_rows_become_padding_rows_of_a_bucket(q_len, kind, skip_scores):
    plan, batch, B = planner(), lengths(q_len, [9] * len(q_len), 0, kind), len(q_len)
    batch.skip_scores = skip_scores
    filled = plan.with_rows((batch, torch.rand(0, 3), 5), {"per_request": torch.rand(B)})
    held, x, constant = filled.args
    assert constant == 5 and (held.kind, held.skip_scores, held.page_table.shape[1]) == (kind, skip_scores, 2)
    T, requests = held.positions.shape[0], held.kv_len.shape[0]
    assert (requests, x.shape) == (max(2, B), (T, 3)) and T >= 2
    assert (held.slots == -1).all() and (held.page_table == -1).all() and not held.visible.any() and not x.any()
    assert filled.kwargs["per_request"].shape == (requests,)
    planned, step = plan.plan(filled.args, filled.kwargs)
    sizes = {PREFILL: (16, 4), DECODE: (4, 4) if B > 2 else (2, 2)}
    assert planned == kind and step.bucket[:2] == sizes[kind]
    got = run_padded(lambda batch, x, constant, per_request: (x + 1, per_request + 1), step)
    out, of_requests = (filled.crop(tensor) for tensor in got)
    assert out.shape == (0, 3)
    assert of_requests.shape == (0 if kind == DECODE else B,)  # of a decode, rows and requests have equal sizes


@pytest.mark.parametrize("kind", [DECODE, PREFILL])
def test_no_rows_where_buckets_hold_one(kind):
    plan = Planner(Buckets("token_sizes", (1,)), Buckets("batch_sizes", (1,)), None)
    filled = plan.with_rows((lengths([0], [9], 0, kind),), {})
    assert plan.plan(filled.args, filled.kwargs)[1].padded_rows == 1


class Served(torch.nn.Module):
    """One layer as a serving loop calls it."""

    def __init__(self):
        super().__init__()
        self.layer = our_layer(stock_layer("deepseek_v32", torch.float32))
        dtypes = {"latent_dtype": torch.float32, "index_dtype": torch.float32}
        self.pool = PagePool([self.layer.dsa_config], num_pages=4, max_requests=2, max_len=128, device="cpu", **dtypes)

    def forward(self, x, batch, pool):
        cos, sin = angles(batch.positions, self.layer.dsa_config.qk_rope_head_dim, x.dtype)
        return self.layer(x, cos, sin, batch, pool.layers[0])[0]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("graphs", ["auto", "piecewise"])
@torch.no_grad()
def test_no_rows_compile_nothing_after_the_warm_up(graphs):
    model = Served()
    compile_model(model, graphs, backend="eager", batch_sizes=(2,), token_sizes=(16,), on_miss="raise")
    for kind, rows in ((PREFILL, 16), (DECODE, 2)):
        model(torch.zeros(rows, 64), Batch.idle(rows, 2, 2, "cpu", kind=kind, skip_scores=False), model.pool)
    model.end_warm_up()
    for kind in (PREFILL, DECODE):
        for B in (0, 1, 2, 3):
            none = torch.zeros(B, dtype=torch.int64)
            batch = Batch.from_lengths(none, none, torch.full((B, 2), -1, dtype=torch.int32), 0, kind=kind)
            assert model(torch.zeros(0, 64), batch, model.pool).shape == (0, 64)
    stats = model.graph_stats()
    assert (stats["compiles"], stats["recompiles"], stats["uncaptured"]) == (2, 0, 2 + 8)


def test_batches_with_rows_are_left_as_they_are():
    assert planner().with_rows((lengths([3], [3], 3),), {}) is None
    assert planner().with_rows((), {"input_ids": torch.zeros(1, 0)}) is None


def test_two_batches_fit_no_bucket():
    batch = lengths([3], [3], 3)
    with pytest.raises(NoBucket, match="more than one Batch"):
        planner().plan((batch,), {"draft": batch})


@pytest.mark.parametrize("keep", [0, 1, 5, 50, -3, torch.tensor([4]), torch.tensor([-1, 0])])
def test_kept_logits_are_those_of_the_columns_asked_for(keep):
    pair = small_pair("deepseek_v32")
    ids, cache = prompt(2, 20), PagedCache(small_pair("deepseek_v32").config, 2, 80)
    pad_forwards(pair.ours)
    with torch.no_grad():
        got = pair.ours(ids, past_key_values=cache, logits_to_keep=keep).logits
        want = pair.stock(ids, logits_to_keep=keep).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_kept_logits_that_cannot_be_padded_fit_no_bucket():
    pair = small_pair("deepseek_v32")
    seen = pad_forwards(pair.ours)
    with torch.no_grad():
        pair.ours(prompt(1, 20), past_key_values=PagedCache(pair.config, 1, 80), logits_to_keep=torch.ones(20).bool())
    assert seen == [("none", "logits_to_keep is neither a number nor a list of columns")]


def test_embeddings_are_padded_whatever_their_positions_are():
    pair = small_pair("deepseek_v32")
    embeds = pair.ours.get_input_embeddings()(prompt(2, 20)).detach()
    seen, positions = pad_forwards(pair.ours), torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        cache = PagedCache(pair.config, 2, 80)
        got = pair.ours(inputs_embeds=embeds, position_ids=positions, past_key_values=cache).logits
        want = pair.stock(inputs_embeds=embeds, position_ids=positions).logits
    assert seen == [(PREFILL, (2, 48, None))]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(), (0,), (3, -1), (1.5,), (True,), ("a", 1), 16, None])
def test_bad_sizes(sizes):
    with pytest.raises(ValueError, match="token_sizes"):
        Buckets("token_sizes", sizes)
