"""What the registry promises of every op: schemas, tags, choice of providers, opcheck, and compiled calls."""

import math
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from compiled_dsa.custom_ops import OPS
from compiled_dsa.custom_ops.layout import FP8, PAGE, latent_pool_shape
from compiled_dsa.testing import random_index_pool, random_latent_pool, random_page_table


def arguments(name: str, T: int, device, fp8: bool, topk: bool = True) -> tuple:
    """Small valid arguments of an op. Outputs hold numbers, since opcheck compares runs bit by bit."""
    integers = {"dtype": torch.int32, "device": device}
    table = random_page_table(2, 3, 7, device)
    requests = torch.arange(T, **integers) % 2
    visible = torch.arange(T, **integers) * 20 + 1
    slots = torch.arange(T, device=device) * 31 - 1
    if name == "batch_metadata":
        lengths = torch.tensor([T // 2, T - T // 2], device=device)
        rows = visible.clone(), slots, requests, visible
        return lengths, lengths + 70, table, lengths - 1, *rows, torch.zeros(3, **integers), torch.zeros(2, **integers)
    latent_pool = random_latent_pool(7, 128, 32, FP8 if fp8 else torch.float32, device)
    index_pool = random_index_pool(7, 32, FP8 if fp8 else torch.float32, device)
    selected = torch.stack([torch.randperm(7 * PAGE, device=device)[:24] for _ in range(T)]).int() if T else None
    selected = (torch.empty(0, 24, **integers) if T == 0 else selected) if topk else None
    if name == "store_latents":
        return latent_pool, torch.randn(T, 128, device=device), torch.randn(T, 32, device=device), slots
    if name == "store_index_keys":
        return index_pool, torch.randn(T, 32, device=device), slots, True
    angles = torch.randn(T, 16, device=device)
    if name == "store_tokens":
        pools = latent_pool, random_index_pool(7, 32, FP8, device)
        q_lora, q_a, kv, k = (torch.randn(T, n, device=device) for n in (48, 48, 160, 32))
        norms = [torch.randn(n, device=device) for n in (48, 128, 32, 32)]
        return *pools, q_lora, q_a, kv, k, *norms, angles, angles, slots, 1e-6, 1e-6, True, True, True
    if name == "encode_queries":
        codes = torch.zeros(T, 3, 64, dtype=torch.uint8, device=device).view(FP8)
        outs = torch.zeros(T, 5, 32, device=device), codes, torch.zeros(T, 3, device=device)
        queries = torch.randn(T, 5, 32, device=device), torch.randn(T, 3, 64, device=device)
        return *outs, *queries, torch.randn(T, 3, device=device), angles, angles, 0.5, True, False, True
    if name == "skinny_linear":
        return tuple(torch.randn(*shape, device=device) for shape in ((T, 32), (24, 32), (T, 24)))
    if name == "unabsorb":
        return tuple(torch.randn(*shape, device=device) for shape in ((T, 8, 32), (8, 24, 32), (T, 8, 24)))
    if name.startswith("index_topk") or name == "select_and_absorb":
        q = torch.randn(T, 8, 32, device=device).to(FP8 if fp8 else torch.float32)
        out = torch.zeros(T, 24, **integers)
        args = (q, torch.randn(T, 8, device=device), index_pool, table, requests, visible, out, True)
        args = (*args, 1 << 20) if name == "index_topk_prefill" else args
        if name == "select_and_absorb":
            shapes = (T, 4, 16), (4, 16, 24), (T, 4, 24)
            args = (*args, *(torch.randn(*shape, device=device) for shape in shapes))
        return (*args, torch.zeros_like(out), 1, 2) if fp8 else args  # what has default values may be left out
    selection = (latent_pool, selected, visible.clamp(max=24), table, requests)
    q_rope, sinks = torch.randn(T, 8, 32, device=device), torch.randn(8, device=device)
    if name == "sparse_mla_decode":
        out, lse = torch.zeros(T, 8, 128, device=device), torch.zeros(T, 8, device=device)
        args = torch.randn(T, 8, 128, device=device), q_rope, *selection, 0.1, sinks, out, lse
        return (*args, True) if fp8 else args
    assert name == "mla_prefill"
    q_nope, kv_b = torch.randn(T, 8, 16, device=device), torch.randn(8, 40, 128, device=device)
    args = q_nope, q_rope, *selection, kv_b, 0.1, sinks, torch.zeros(T, 8, 24, device=device), 1 << 20
    return (*args, None, True) if fp8 else args


@pytest.mark.parametrize("name", OPS)
def test_fault_h2_ops_return_nothing_and_mutate_what_they_write(name):
    schema = OPS[name].overload._schema
    assert not schema.returns
    mutated = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    writes = {"store_latents": ["pool"], "store_index_keys": ["pool"], "sparse_mla_decode": ["out", "lse"]}
    writes["batch_metadata"] = ["positions", "slots", "req_of_row", "visible", "q_start", "kv_out"]
    writes |= dict.fromkeys(("mla_prefill", "unabsorb", "skinny_linear"), ["out"])
    writes["store_tokens"] = ["latent_pool", "index_pool", "q_lora"]
    writes["select_and_absorb"] = ["topk_out", "q_latent", "positions_out"]
    writes["encode_queries"] = ["q_rope", "index_q", "weights"]
    assert mutated == writes.get(name, ["topk_out", "positions_out"])


@pytest.mark.parametrize("name", OPS)
def test_triton_providers_can_be_imported(name):
    """The choice of a provider passes over one that cannot be, and another takes its place without a word."""
    pytest.importorskip("triton")
    assert "triton" not in OPS[name].providers or callable(OPS[name].module("triton").run)


def test_split_ops_are_the_unsafe_ones():
    unsafe = {op.overload for op in OPS.values() if torch.Tag.cudagraph_unsafe in op.overload.tags}
    assert (
        unsafe
        == {op.overload for op in OPS.values() if op.split}
        == {OPS["index_topk_prefill"].overload, OPS["mla_prefill"].overload}
    )


@pytest.mark.parametrize("name", OPS)
def test_what_was_asked_for_is_never_replaced(name):
    args = arguments(name, 2, "cpu", fp8=False)
    with pytest.raises(ValueError, match=f"{name}: no provider takes .*no such provider; {name} has reference, triton"):
        OPS[name].overload(*args, provider="tritn")
    double = [a.double() if isinstance(a, torch.Tensor) and a.dtype == torch.float32 else a for a in args]
    if name == "sparse_mla_decode":
        double[8], double[10] = args[8], args[10]
    if name == "mla_prefill":
        double[9] = args[9]
    if name == "encode_queries":
        double[2] = args[2]
    if name == "batch_metadata":  # integers only; kernels refuse its page table when columns are not dense
        double[2] = args[2].t().contiguous().t()
    with pytest.raises(ValueError, match=r"triton: .* has (dtype torch.float64; it must be torch.float32 or|strides)"):
        OPS[name].overload(*double, provider="triton")


def test_all_tensors_share_a_device():
    """With one on meta, torch would call the fake, which computes nothing."""
    args = list(arguments("select_and_absorb", 2, "cpu", fp8=False))
    args[9] = args[9].to("meta")
    with pytest.raises(ValueError, match="w_uk is on meta, other arguments on cpu"):
        OPS["select_and_absorb"].overload(*args)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("T", [0, 1, 7])
@pytest.mark.parametrize(("fp8", "topk"), [(False, True), (True, True), (True, False)])
def test_fault_h3_opcheck(name, T, fp8, topk, device):
    if not topk and "mla" not in name:
        pytest.skip("the op has no topk argument")
    utils = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if fp8 and name.startswith(("index_topk", "select_and_absorb")) or name == "encode_queries":
        utils = utils[1:]  # torch cannot compare e4m3 tensors, which test_schema does with the query
    torch.library.opcheck(OPS[name].overload, arguments(name, T, device, fp8, topk), test_utils=utils)


def test_fault_h1_no_copy_of_a_pool_of_which_one_layer_is_mutated(device):
    """A pool [layers, pages, 64, 656]: the op takes a slice of it, and Inductor hands the slice over in place."""
    shape, dtype = latent_pool_shape(5, 512, 64, FP8)
    pool = torch.zeros(3, *shape, dtype=dtype, device=device)

    def step(pool, latents, rope, slots):
        torch.ops.compiled_dsa.store_latents(pool[1], latents * 2, rope, slots)
        return latents + 1

    latents, rope = torch.ones(4, 512, device=device), torch.ones(4, 64, device=device)
    slots = torch.tensor([0, 70, -1, 5], device=device)
    _, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), pool, latents, rope, slots)
    allocated = [
        math.prod(int(n) for n in sizes.split(",") if n.strip())
        for sizes in re.findall(r"= empty_strided_\w+\(\(([\d, ]*)\)", code)
    ]
    assert allocated and max(allocated) <= 4 * 512, f"Inductor allocates {max(allocated)} elements"
    assert "store_latents.default(reinterpret_tensor(" in code
    layers = pool.flatten(1).any(dim=1).tolist()
    assert layers == [False, True, False]
    want = torch.zeros(shape, dtype=dtype)
    OPS["store_latents"].reference(want, 2 * latents.cpu(), rope.cpu(), slots.cpu())
    assert torch.equal(pool[1].cpu(), want)


def test_fault_h3_compiled_calls_keep_strides_of_outputs(device):
    """8 heads of a buffer of 64, between pointwise ops: equal to eager, and the other heads stay as they were."""
    q_latent, q_rope, pool, topk, count, table, requests, scale, sinks, _, lse, _ = arguments(
        "sparse_mla_decode", 7, device, fp8=True
    )

    def step(q, buffer, lse):
        torch.ops.compiled_dsa.sparse_mla_decode(
            q * 2, q_rope, pool, topk, count, table, requests, scale, sinks, buffer[:, :8], lse
        )
        return buffer[:, :8] + 1, lse * 2

    eager, compiled = (torch.full((7, 64, 128), 5.0, device=device) for _ in range(2))
    want = step(q_latent, eager, lse.clone())
    got = torch.compile(step, fullgraph=True)(q_latent, compiled, lse)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(compiled, eager)
    assert got[0].stride() == want[0].stride() and (compiled[:, 8:] == 5.0).all()


@pytest.mark.parametrize(
    ("missing", "raises"), [("compiled_dsa.custom_ops.kernels.select", True), ("flash_mla", False)]
)
def test_only_libraries_may_be_missing(missing, raises, monkeypatch):
    """A provider of ours that cannot be imported must not be passed over in silence."""

    def absent(self, provider):
        raise ImportError(f"cannot import name 'x' from {missing!r}", name=missing)

    monkeypatch.setattr("compiled_dsa.custom_ops.registry.Op.module", absent)
    args = arguments("store_latents", 1, "cpu", fp8=False)
    if raises:
        with pytest.raises(ImportError, match="cannot import name"):
            OPS["store_latents"].refusal("triton", *args)
    else:
        assert "cannot be imported" in OPS["store_latents"].refusal("triton", *args)
