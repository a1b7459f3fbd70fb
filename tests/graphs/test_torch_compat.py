"""What torch counts is counted."""

import torch

from compiled_dsa.graphs.torch_compat import graph_breaks


def test_graph_breaks_are_counted():
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    before = graph_breaks()
    torch.compile(broken, backend="eager")(torch.ones(2))
    assert graph_breaks() == before + 1
