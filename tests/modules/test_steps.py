"""Padding to buckets, without graphs: a padded forward on static buffers gives what the forward itself gives."""

import functools

import pytest
import torch

from compiled_dsa.batch import DECODE, PREFILL, Batch
from compiled_dsa.graphs.buckets import Buckets
from compiled_dsa.graphs.buffers import Call, StaticInputs
from compiled_dsa.huggingface import PagedCache
from compiled_dsa.steps import NoBucket, Planner
from tests.huggingface.tiny_models import MODEL_TYPES, left_padding, prompt, small_pair


def planner(max_cache_len: int | None = None) -> Planner:
    return Planner(Buckets("token_sizes", (16, 48, 64)), Buckets("batch_sizes", (2, 4)), max_cache_len)


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
    assert prefills == [(1, 48, 1), (2, 48, 1), (2, 48, 1), "more than 64 tokens"]
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
    assert [bucket for _, bucket in seen] == [(2, 48, 0), (2, 16, 0), (2, 48, 0)]
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
    return Batch.from_lengths(torch.tensor(q_len), torch.tensor(kv_len), table, rows, kind=kind)


def test_a_batch_is_padded_in_rows_requests_and_pages():
    batch = lengths([3, 2], [10, 4], 5)
    ids = torch.arange(1, 6)
    kind, step = planner(max_cache_len=256).plan((ids,), {"batch": batch})
    assert (kind, step.bucket, step.rows, step.padded_rows) == (PREFILL, (16, 4), 5, 16)
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
    assert (step.bucket, step.rows, step.padded_rows) == ((8, 4), 6, 8)


def test_a_wider_page_table_is_refused():
    plan = planner(max_cache_len=128)
    _, step = plan.plan((lengths([3], [3], 3, columns=3),), {})
    with pytest.raises(ValueError, match=r"page_table is torch.int32 \(1, 3\).*room for torch.int32 \(4, 2\)"):
        run_padded(lambda batch: batch, step)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (lengths([1] * 5, [1] * 5, 5, DECODE), "more than 4 requests"),
        (lengths([65], [65], 65, columns=2), "more than 64 rows"),
        (lengths([2, 1], [2, 1], 3, DECODE), "3 rows of 2 requests"),
    ],
)
def test_what_fits_no_bucket_says_why(batch, reason):
    with pytest.raises(NoBucket, match=reason):
        planner().plan((batch,), {})


@pytest.mark.parametrize("sizes", [(), (0,), (3, -1), (1.5,)])
def test_bad_sizes(sizes):
    with pytest.raises(ValueError, match="token_sizes"):
        Buckets("token_sizes", sizes)
