"""Which keys the indexers of a Hugging Face model select: handed out of forwards, and taken in instead.

    with capture_indices(model) as captured:
        model.generate(...)
    with inject_indices(other_model, captured):  # the same forwards, whatever its indexers would select
        other_model(...)

A selection is one int32 tensor [rows, K] for each layer that has an indexer, by the layer's number: rows are those of
the forward, row by row of its batch (B * S), and an entry is a position among the tokens of its row of the batch,
padding not counted; -1 fills lanes past the last. Such positions mean the same in every kind of cache.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_dsa.huggingface.attention import DSAAttentionMixin

Selection = dict[int, Tensor]


class Exchange:
    """What the layers of a model hand out in one forward, or take in.

    Attributes:
        handed_out: selections of the layers so far, or None when none are asked for.
        taken_in: selections for the forward under way, or None.
    """

    def __init__(self, handed_out: Selection | None = None, taken_in: Selection | None = None):
        self.handed_out, self.taken_in = handed_out, taken_in

    def options(self, layer: Any, rows: int, device: torch.device) -> dict[str, Tensor]:
        """The keyword arguments of ``SparseAttention.forward`` for this layer, as far as it takes part."""
        if layer.dsa_config.window is not None:
            return {}
        if self.taken_in is not None:  # a layer that shares takes part of the latest layer that has an indexer
            return {"selected": self.taken_in[max(i for i in self.taken_in if i <= layer.layer_idx)].to(device)}
        if self.handed_out is None or layer.indexer is None:
            return {}
        positions = torch.empty(rows, layer.dsa_config.index_topk, dtype=torch.int32, device=device)
        self.handed_out[layer.layer_idx] = positions
        return {"positions_out": positions}


@contextmanager
def capture_indices(model: PreTrainedModel) -> Iterator[list[Selection]]:
    """Hands out what the indexers of a model select in each of its forwards, for example to replay it in training.

    Args:
        model: after ``replace_attention``, eager or compiled, but without CUDA graphs: the positions are outputs that
            a captured graph does not have. Code compiled before is compiled once more. The outputs of graphs that
            torch.compile(mode="reduce-overhead") makes by itself must be copied before the next forward.

    Yields:
        A list that gets one selection for each forward (see above), those of ``generate`` included.

    Raises:
        ValueError: the model is not one of ours, runs in CUDA graphs, or exchanges indices already; inside a forward,
            for a call that needs transformers' own forward (gradients, masks over queries and keys, ...), whose
            indexer hands out no positions: call it under ``torch.no_grad()``.
    """
    _check_model(model)
    if hasattr(model, "graph_stats") and (graphs := model.graph_stats()["graphs"]) != "off":
        raise ValueError(f"the model is compiled with graphs={graphs!r}; capture_indices needs graphs='off'")
    forwards: list[Selection] = []
    current: Selection = {}

    def begin(*_) -> None:
        if not torch.compiler.is_compiling():
            current.clear()  # of a forward that failed

    def end(*_) -> None:
        if not torch.compiler.is_compiling():
            forwards.append(dict(current))
            current.clear()

    hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
    with _exchanging(model, Exchange(handed_out=current), hooks):
        yield forwards


@contextmanager
def inject_indices(model: PreTrainedModel, selections: Sequence[Selection]) -> Iterator[None]:
    """Within it, the model attends given positions in place of those that its indexers would select.

    Keys are stored as ever, so forwards after it find them. A position that a row does not see, or below 0, is left
    out; the positions of a row must be distinct. With what ``capture_indices`` handed out, an eager fp32 model gives
    the outputs of that run bit for bit; up to rounding where that run needed no scores, all rows being within K tokens.

    For training: no gradient reaches the indexer, whose choice is not asked for, and none the rest, since the ops carry
    none. So a policy's log-probabilities can be replayed under ``torch.no_grad()``; a forward with gradients is
    transformers' own, which selects by itself, and is refused here.

    Args:
        model: after ``replace_attention``, not compiled.
        selections: one for each forward within, in order: int32 or int64 [rows, n] of every layer that has an indexer.

    Raises:
        ValueError: the model is not one of ours, is compiled, or exchanges indices already; a selection lacks a layer
            or has layers without an indexer; inside a forward: other rows than the selection has, more forwards than
            selections, or a call that needs transformers' own forward.
    """
    layers = _check_model(model)
    if hasattr(model, "graph_stats"):
        raise ValueError("the model is compiled; inject_indices takes models that are not, as before compile_model")
    numbers = {layer.layer_idx for layer in layers if layer.indexer is not None}
    for i, selection in enumerate(selections):
        if selection.keys() != numbers:
            raise ValueError(
                f"selections[{i}] has layers {sorted(selection)}; those with an indexer are {sorted(numbers)}"
            )
    exchange, left = Exchange(taken_in={}), iter(list(selections))

    def begin(*_) -> None:
        exchange.taken_in = next(left, None)
        if exchange.taken_in is None:
            raise ValueError(f"selections has {len(selections)} entries; this is one forward more")

    with _exchanging(model, exchange, [model.register_forward_pre_hook(begin)]):
        yield


def _check_model(model: PreTrainedModel) -> list[DSAAttentionMixin]:
    """The model's attention layers, none of which exchanges indices now."""
    layers = [m for m in model.modules() if isinstance(m, DSAAttentionMixin)]
    if not layers:
        raise ValueError(f"model is a {type(model).__name__} without our attention; call replace_attention first")
    if any(layer.dsa_exchange is not None for layer in layers):
        raise ValueError("capture_indices or inject_indices is active on this model already")
    return layers


@contextmanager
def _exchanging(model: PreTrainedModel, exchange: Exchange, hooks: list) -> Iterator[None]:
    layers = _check_model(model)
    try:
        for layer in layers:
            layer.dsa_exchange = exchange
        yield
    finally:
        for layer in layers:
            del layer.dsa_exchange  # the class has None
        for hook in hooks:
            hook.remove()
