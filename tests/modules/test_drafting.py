"""Batches advanced by one token a request, and draft layers that attend what their target selected."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_dsa import Batch, SparseAttention
from compiled_dsa.batch import DECODE, PREFILL
from compiled_dsa.drafting import with_own_keys
from compiled_dsa.testing import random_page_table
from tests.huggingface.tiny_models import INDEX_TOPK
from tests.modules.layers import Serving, angles, our_layer, stock_layer

TENSORS = ("positions", "slots", "req_of_row", "visible", "q_start", "kv_len", "page_table")


def assert_same(got: Batch, want: Batch) -> None:
    for name in TENSORS:
        a, b = getattr(got, name), getattr(want, name)
        assert a.dtype == b.dtype and torch.equal(a, b), name
    assert (got.kind, got.skip_scores) == (want.kind, want.skip_scores)


def one_token_each(kv_len: list[int], page_table: torch.Tensor) -> Batch:
    return Batch.decode(torch.tensor(kv_len, dtype=torch.int64), page_table)


requests = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100), st.integers(-1, 10)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(requests, st.integers(1, 5), st.integers(0, 3))
def test_steps_are_decode_batches_of_the_lengths_that_follow(drawn, k, padding):
    """With all rows accepted and with some; requests that never had a key stay padding in every step."""
    q_len, before, accepted = (list(values) for values in zip(*drawn))
    page_table = random_page_table(len(drawn), 2, 20)
    kv_len = [q + p for q, p in zip(q_len, before)]
    lengths = torch.tensor(q_len), torch.tensor(kv_len), page_table, sum(q_len) + padding
    batch = Batch.from_lengths(*lengths)
    kept = [p + min(max(a, 0), q) for q, p, a in zip(q_len, before, accepted)]
    for held, steps in ((kv_len, batch.steps(k)), (kept, batch.steps(k, torch.tensor(accepted)))):
        assert len(steps) == k
        advanced = batch.advance(None if held is kv_len else torch.tensor(accepted))
        for i, step in enumerate(steps):
            assert_same(step, one_token_each([n + i + 1 if n else 0 for n in held], page_table))
            assert_same(step, advanced)
            advanced = advanced.advance()
    extended = Batch.from_lengths(*lengths, accepted=torch.tensor(accepted))  # accepted already taken into kv_len
    assert_same(extended.advance(), batch.advance(torch.tensor(accepted)))


def test_after_a_verify_step_of_4():
    page_table = random_page_table(3, 2, 6)
    verify = Batch.decode(torch.tensor([10, 66, 0]), page_table, 4)
    accepted = torch.tensor([3, 1, 1])
    first, second = verify.steps(2, accepted, skip_scores=True)
    assert first.positions.tolist() == [9, 63, 0] and second.positions.tolist() == [10, 64, 0]
    assert first.visible.tolist() == first.kv_len.tolist() == [10, 64, 0]
    assert second.slots.tolist() == [page_table[0, 0] * 64 + 10, page_table[1, 1] * 64, -1]
    assert (first.kind, first.skip_scores) == (DECODE, True)
    assert verify.last_rows(accepted)[:2].tolist() == [2, 4]
    assert verify.last_rows().tolist() == [3, 7, 11]


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_verify_step_of_no_requests(tokens):
    none, page_table = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 4, dtype=torch.int32)
    verify = Batch.decode(none, page_table, tokens)
    for accepted in (None, none):
        assert verify.last_rows(accepted).shape == (0,) and verify.last_rows(accepted).dtype == torch.int64
        for step in (verify.advance(accepted), *verify.steps(2, accepted)):
            assert_same(step, one_token_each([], page_table))
            assert step.positions.shape == step.kv_len.shape == (0,)


def test_steps_of_a_padded_batch():
    """The buffers of a bucket: 2 requests with a row each in a batch of 8 rows and 4 requests."""
    idle = Batch.idle(8, 4, 2, "cpu", kind=PREFILL, skip_scores=False)
    real = Batch.from_lengths(torch.tensor([1, 2]), torch.tensor([5, 63]), random_page_table(2, 2, 4), 3)
    for name in ("positions", "slots", "req_of_row", "visible", "kv_len", "page_table"):
        buffer, values = getattr(idle, name), getattr(real, name)
        buffer[: values.shape[0]] = values
    idle.q_start[:] = torch.tensor([0, 1, 3, 3, 3])
    for padded, step in zip(idle.steps(3), real.steps(3)):
        assert padded.slots.tolist() == step.slots.tolist() + [-1, -1]
        assert padded.kv_len.tolist() == padded.visible.tolist() == step.kv_len.tolist() + [0, 0]
    rows = idle.last_rows()
    assert rows[:2].tolist() == [0, 2] and ((rows >= 0) & (rows < 8)).all()


def test_tokens_without_a_page_have_no_slot():
    step = Batch.decode(torch.tensor([64]), torch.tensor([[3]], dtype=torch.int32)).advance()
    assert (step.slots.tolist(), step.visible.tolist()) == ([-1], [65])


def test_bad_steps():
    batch = one_token_each([3, 4], random_page_table(2, 1, 2))
    with pytest.raises(ValueError, match="k=0; it must be at least 1"):
        batch.steps(0)
    with pytest.raises(ValueError, match=r"accepted is torch.int64 \(1,\); it must be int32 or int64 \[2\]"):
        batch.advance(torch.tensor([1]))
    with pytest.raises(ValueError, match="accepted is torch.float32"):
        batch.last_rows(torch.ones(2))
    with pytest.raises(ValueError, match=r"topk has shape \(3, 8\); it must be \[2, K\]"):
        with_own_keys(torch.zeros(3, 8, dtype=torch.int32), batch)


@pytest.mark.parametrize("held", [3, 6, 7, 8, 20])
def test_own_keys_take_free_lanes_and_then_those_of_others(held):
    K, k = 8, 5
    batch = one_token_each([held], torch.tensor([[2]], dtype=torch.int32))
    chosen = torch.full((1, K), -1, dtype=torch.int32)
    chosen[0, : min(K, held)] = 128 + torch.arange(held)[-K:]
    topk, new = chosen, []
    for step in batch.steps(k):
        topk = with_own_keys(topk, step)
        new.append(128 + held + len(new))
        keys = [slot for slot in topk[0].tolist() if slot != -1]
        assert len(set(keys)) == len(keys) == min(K, held + len(new))
        assert set(new) <= set(keys) <= set(range(128, 128 + held + len(new)))
        assert topk[0, : len(keys)].tolist() == keys  # lanes within the count of the row
    assert chosen[0, : min(K, held)].tolist() == [128 + i for i in range(held)][-K:]  # left alone


# ---- a target layer with an indexer, a draft layer without -----------------------------------------------------------


def target_and_draft(lengths: tuple[int, ...]) -> Serving:
    torch.manual_seed(0)
    stock = [stock_layer("glm_moe_dsa", torch.float64, layer) for layer in (0, 1)]
    serving = Serving.of([our_layer(s) for s in stock], [torch.randn(n, 64, dtype=torch.float64) for n in lengths])
    assert serving.layers[1].indexer is None
    return serving


def verified(serving: Serving, prompt: list[int], accepted: torch.Tensor, n: int = 4) -> tuple[Batch, torch.Tensor]:
    """Both layers have the prompts and n more tokens of each request; (batch, the target's selection) of the latter."""
    serving.step(prompt)
    x, cos, sin, batch = serving.inputs([n] * len(prompt), kind=DECODE)
    with torch.no_grad():
        _, topk = serving.layers[0](x, cos, sin, batch, serving.pool.layers[0])
        serving.layers[1](x, cos, sin, batch, serving.pool.layers[1], topk)
    return batch, topk


def draft(layer: SparseAttention, pools, x, batch: Batch, topk, accepted) -> tuple[list, list]:
    """(outputs, selections) of one step for each x[i] [B, hidden]."""
    selection, outputs, selections = topk[batch.last_rows(accepted)], [], []
    for hidden, step in zip(x, batch.steps(len(x), accepted)):
        selection = with_own_keys(selection, step)
        cos, sin = angles(step.positions, layer.dsa_config.qk_rope_head_dim, hidden.dtype)
        out, passed_on = layer(hidden, cos, sin, step, pools, selection)
        assert passed_on is selection
        outputs.append(out)
        selections.append(selection)
    return outputs, selections


def attended(layer: SparseAttention, x, position: int, pool, slots: list[int]) -> torch.Tensor:
    """Ordinary attention [hidden] of one row x [1, hidden] over the keys in ``slots``."""
    c = layer.dsa_config
    p = layer.project(x, *angles(torch.tensor([position]), c.qk_rope_head_dim, x.dtype))
    latents, rope = pool.flatten(0, 1)[slots].split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
    keys, values = (
        layer.kv_b_proj(latents).unflatten(-1, (c.num_heads, -1)).split([c.qk_nope_head_dim, c.v_head_dim], -1)
    )
    scores = torch.einsum("hd,jhd->hj", p.q_nope[0], keys) + p.q_rope[0] @ rope.T
    out = torch.einsum("hj,jhv->hv", (scores * c.scale).softmax(-1), values)
    return layer.o_proj(out.flatten())


@pytest.mark.parametrize("accepted", [(4, 1, 2), (1, 3, 4)], ids=str)
def test_a_draft_layer_attends_the_keys_of_its_targets_row_and_its_own(accepted):
    serving = target_and_draft((110, 60, 26))
    accepted = torch.tensor(accepted)
    prompt = [100, 50, 8]  # the last one stays below K keys for its first steps
    batch, topk = verified(serving, prompt, accepted)
    layer, pools = serving.layers[1], serving.pool.layers[1]
    x = torch.randn(5, 3, 64, dtype=torch.float64)
    with torch.no_grad():
        outputs, _ = draft(layer, pools, x, batch, topk, accepted)
        for request, (held, count) in enumerate(zip(prompt, accepted.tolist())):
            keys = topk[4 * request + count - 1].tolist()
            for i, out in enumerate(outputs):
                position = held + count + i
                own = int(serving.pool.page_table[request, position // 64]) * 64 + position % 64
                if position < INDEX_TOPK:
                    keys[position] = own  # the first lane without a key
                else:
                    keys[position % INDEX_TOPK] = own
                assert own in keys
                slots = [slot for slot in keys if slot != -1]
                assert len(slots) == min(INDEX_TOPK, position + 1)
                want = attended(layer, x[i, request : request + 1], position, pools.latents, slots)
                torch.testing.assert_close(out[request], want, rtol=1e-10, atol=1e-10)


def test_few_keys_are_all_attended():
    """While no request has more than K keys, the reused selection is everything: what skip_scores attends."""
    serving = target_and_draft((16, 14))
    accepted = torch.tensor([4, 2])
    batch, topk = verified(serving, [INDEX_TOPK - 8, 3], accepted)
    layer, pools = serving.layers[1], serving.pool.layers[1]
    x = torch.randn(4, 2, 64, dtype=torch.float64)
    with torch.no_grad():
        outputs, _ = draft(layer, pools, x, batch, topk, accepted)
        for hidden, step, out in zip(x, batch.steps(4, accepted, skip_scores=True), outputs):
            cos, sin = angles(step.positions, layer.dsa_config.qk_rope_head_dim, hidden.dtype)
            torch.testing.assert_close(layer(hidden, cos, sin, step, pools)[0], out, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("fresh_dynamo")
def test_all_draft_steps_are_one_graph():
    """Compiled whole, and used again when the second request has become padding, which attends nothing."""
    serving = target_and_draft((60, 40))
    accepted = torch.tensor([2, 3])
    batch, topk = verified(serving, [50, 30], accepted)
    layer, pools = serving.layers[1], serving.pool.layers[1]
    x = torch.randn(3, 2, 64, dtype=torch.float64)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def run(x, batch, topk, accepted):
        return torch.stack(draft(layer, pools, x, batch, topk, accepted)[0])

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    with torch.no_grad():
        want = run(x, batch, topk, accepted)
        torch.testing.assert_close(compiled(x, batch, topk, accepted), want)
        kv_len = torch.tensor([batch.kv_len[0], 0], dtype=torch.int32)
        alone = compiled(x, replace(batch, kv_len=kv_len), topk, accepted)
    assert len(graphs) == 1
    torch.testing.assert_close(alone[:, 0], want[:, 0])
    assert (alone[:, 1] == 0).all()
