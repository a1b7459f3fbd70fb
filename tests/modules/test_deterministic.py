"""``DSAConfig.deterministic`` in a layer: it reaches the attention ops, and neighbours leave a row's bits alone."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_dsa.batch import DECODE, PREFILL
from tests.modules.layers import Serving, our_layer, stock_layer

OPS = ("sparse_mla_decode", "mla_prefill")


class Attentions(TorchDispatchMode):
    """What attention ops were called with: ``flags`` as they came, inputs and outputs copied."""

    def __init__(self):
        super().__init__()
        self.flags, self.calls = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("compiled_dsa::")
        if name in OPS:
            place = [a.name for a in func._schema.arguments].index("deterministic")
            self.flags.append(args[place] if len(args) > place else False)
            self.calls.append((func, [a.clone() if isinstance(a, torch.Tensor) else a for a in args]))
        return result


def serving_of(lengths, deterministic: bool) -> Serving:
    """One layer in fp32; the first request is the same whatever the lengths, which are at most the 200 selected."""
    layer = our_layer(stock_layer("deepseek_v32", torch.float32, index_topk=200))
    layer.dsa_config = layer.indexer.dsa_config = dataclasses.replace(layer.dsa_config, deterministic=deterministic)
    torch.manual_seed(0)
    return Serving.of([layer], [torch.randn(n, 64) for n in lengths])


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_ops_are_told(deterministic):
    serving = serving_of((20, 9), deterministic)
    with Attentions() as attentions:
        serving.step([19, 8], kind=PREFILL)
        serving.step([1, 1], kind=DECODE)
    assert attentions.flags == [deterministic] * 2
    assert [func._schema.name for func, _ in attentions.calls] == [
        "compiled_dsa::mla_prefill",
        "compiled_dsa::sparse_mla_decode",
    ]


@pytest.mark.parametrize("others", [(3, 5), (200, 70)])
def test_rows_of_a_layer_have_the_bits_that_they_have_alone(others):
    """Of the attention, that is: of the queries and keys that the layer makes, every row is attended once more."""
    serving = serving_of((30, *others), deterministic=True)
    with Attentions() as attentions:
        serving.step([29, others[0] - 1, others[1] - 1], padding=3, kind=PREFILL)
        serving.step([1, 1, 1], padding=2, kind=DECODE)
    for func, args in attentions.calls:
        names = [a.name for a in func._schema.arguments]
        by_row = {"q_latent", "q_nope", "q_rope", "topk", "count", "req_of_row", "out", "lse"}
        outputs = [a for name, a in zip(names, args) if name in ("out", "lse")]
        T = len(outputs[0])
        for row in range(0, T, max(1, T // 12)):
            alone = [
                a[row : row + 1].clone() if name in by_row and a is not None else a for name, a in zip(names, args)
            ]
            func(*alone)
            for name, got, whole in zip(names, alone, args):
                assert name not in ("out", "lse") or torch.equal(got[0], whole[row]), (name, row)


@pytest.mark.parametrize("kind", [PREFILL, DECODE])
def test_other_neighbours(kind):
    """As many rows, so that the GEMMs round alike, and the first request at the same place: equal outputs."""
    outs = []
    for lengths in ((103, 9, 5), (103, 200, 70)):
        serving = serving_of(lengths, deterministic=True)
        serving.step([99, lengths[1] - 4, lengths[2] - 4], kind=PREFILL)
        outs.append(serving.step([4, 4, 4], kind=kind)[0][:4])
    assert torch.equal(*outs)
