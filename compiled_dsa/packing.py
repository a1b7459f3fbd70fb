"""Packed projections: weights that multiply the same rows lie side by side, so that one GEMM makes all their products.

Of a layer that has all of them, two GEMMs take the place of six:

    hidden:  q_a_proj | kv_a_proj_with_mqa | wk | weights_proj    over hidden states
    q_lora:  q_b_proj | wq_b                                      over normalised q_lora

Every parameter stays the object that it was, with its name, and becomes a view of the rows of a buffer that no state
dict contains: values written in place are seen at once, and no memory is added. What is not a plain linear layer (fp8
with scales, LoRA, tensor-parallel shards, hooks, offloaded weights), has another dtype or device than the first of its
group, or shares memory of its weight with another module, stays outside and is called as ever.

Nothing is ever computed from stale weights. ``to()``, copying and unpickling pack anew. A weight that is replaced, gets
hooks, a wrapper or an adapter, or needs a gradient has its group called one by one until ``pack_projections`` is called
again. Weights moved by assignment to ``.data`` are copied back into the buffer before the next eager forward, or before
the next forward of a model after ``replace_attention``, compiled or not.

Legend: T rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from compiled_dsa.custom_ops.skinny_linear import skinny_linear

INDEXER = ("wk", "wq_b", "weights_proj")  # these belong to the layer's indexer
HEAD_WEIGHTS = "weights_proj"
# Neighbours are multiplied together. What some calls do without lies at the ends: the queries where only keys are
# stored, the index weights and queries where nothing is scored.
GROUPS: dict[str, tuple[str, ...]] = {
    "hidden": ("q_proj", "q_a_proj", "gate_proj", "g_proj", "kv_a_proj_with_mqa", "wk", HEAD_WEIGHTS),
    "q_lora": ("q_b_proj", "wq_b"),
}

Model = TypeVar("Model", bound=nn.Module)


def group_names(group: str, *, scores: bool) -> tuple[str, ...]:
    """The projections of a group; without scores not its last one, which only these need."""
    return GROUPS[group] if scores else GROUPS[group][:-1]


def pack_projections(model: Model) -> Model:
    """Packs the projections of every attention layer in ``model``, in place, and returns it.

    ``compile_model`` does it; call it yourself for a model that runs eagerly or that you compile. Call it when weights
    are loaded, and again after ``load_state_dict(assign=True)`` or after adapters were taken off. It changes results by
    no more than GEMMs of another shape round differently. ``unpack_projections`` undoes it.

    Raises:
        ValueError: the model has no ``SparseAttention``, also none made by ``replace_attention``.
    """
    shared = _shared_weights(model)
    for layer in _layers(model):
        for group, names in GROUPS.items():
            own = [name for name in names if id(getattr(_projection(layer, name), "weight", None)) not in shared]
            layer.pack(group, own)
    return model


def unpack_projections(model: Model) -> Model:
    """Undoes ``pack_projections``: every parameter has memory of its own again. Raises as that does."""
    for layer in _layers(model):
        for group in tuple(layer.packs or ()):
            layer.drop_pack(group)
    return model


@dataclass
class Pack:
    """A group of one layer: its parameters in the order of the buffers, and where they lie in memory."""

    weights: dict[str, nn.Parameter]
    biases: dict[str, nn.Parameter | None]
    addresses: list[int]  # of the buffers, then of the parameters

    def parameters(self) -> list[nn.Parameter]:
        return [*self.weights.values(), *(bias for bias in self.biases.values() if bias is not None)]

    def rows(self, names: Iterable[str]) -> tuple[list[str], int, list[int]]:
        """Of ``names`` those packed here, the first's row in the buffer, and the rows of each."""
        wanted = [name for name in self.weights if name in names]
        first, sizes = 0, []
        for name, weight in self.weights.items():
            if name in wanted:
                sizes.append(weight.shape[0])
            elif not sizes:
                first += weight.shape[0]
        return wanted, first, sizes


class PackedProjections(nn.Module):
    """Base of the attention layers: the groups that are packed, each with a buffer ``packed_<group>`` [rows, in] and,
    where one of its projections has a bias, ``packed_<group>_bias`` [rows]."""

    packs: dict[str, Pack] | None = None

    def products(
        self, group: str, x: Tensor, names: Iterable[str], *, fp32: bool = False, rounded: bool = True
    ) -> dict[str, Tensor]:
        """Products [T, out] of x [T, in] with projections of a group, from one GEMM.

        Args:
            names: neighbours in ``GROUPS``.
            fp32: of ``HEAD_WEIGHTS``, not rounded to the dtype of x.
            rounded: are the others, where the GEMM has not? False for a caller that rounds them itself.

        Returns:
            By name. The caller calls the projections that are missing here, which may be all.
        """
        if not torch.compiler.is_compiling():
            self.keep_packed()
        pack = None if self.packs is None else self.packs.get(group)
        if pack is None or not self._is_current(pack):
            return {}
        wanted, first, sizes = pack.rows(names)
        if len(wanted) < 2:
            return {}
        rows = slice(first, first + sum(sizes))
        bias = getattr(self, f"packed_{group}_bias", None)
        wide = fp32 and HEAD_WEIGHTS in wanted
        product = _multiply(x, getattr(self, f"packed_{group}")[rows], None if bias is None else bias[rows], wide)
        made = dict(zip(wanted, product.split(sizes, dim=-1)))
        return {n: part.to(x.dtype) if rounded and n != HEAD_WEIGHTS else part for n, part in made.items()}

    def _is_current(self, pack: Pack) -> bool:
        """Would calls of the projections multiply with what is packed?

        Compiled code guards the answer, except for hooks and wrappers, of which torch.compile takes no notice once it
        has traced.
        """
        if torch.is_grad_enabled() and any(p.requires_grad for p in pack.parameters()):
            return False
        for name, weight in pack.weights.items():
            linear = _projection(self, name)
            if not _is_plain(linear) or linear.weight is not weight or linear.bias is not pack.biases[name]:
                return False
        return True

    def keep_packed(self) -> None:
        """Packs anew what lies elsewhere than in the buffers. Costs a look at each address otherwise."""
        for group, pack in list((self.packs or {}).items()):
            tensors = [*self._buffers_of(group), *pack.parameters()]
            if any(t.data_ptr() != address for t, address in zip(tensors, pack.addresses)):
                self.pack(group, list(pack.weights))

    def pack(self, group: str, names: list[str]) -> None:
        """Packs those of ``names`` that can be, in the buffers that are there if they fit; CUDA graphs read these."""
        linears = {name: linear for name in names if _can_pack(linear := _projection(self, name))}
        kinds = {name: (linear.weight.dtype, linear.weight.device) for name, linear in linears.items()}
        linears = {name: linear for name, linear in linears.items() if kinds[name] == next(iter(kinds.values()))}
        if len(linears) < 2:
            self.drop_pack(group)
            return
        sizes = [linear.weight.shape[0] for linear in linears.values()]
        weights = {name: linear.weight for name, linear in linears.items()}
        biases = {name: linear.bias for name, linear in linears.items()}
        if self.packs is not None and group in self.packs and list(self.packs[group].weights) != list(weights):
            self.drop_pack(group)
        with torch.no_grad(), torch.inference_mode(False):  # forwards in every grad mode read it
            self._hold(f"packed_{group}", list(weights.values()), sizes)
            if any(bias is not None for bias in biases.values()):
                self._hold(f"packed_{group}_bias", list(biases.values()), sizes)
            else:
                self._buffers.pop(f"packed_{group}_bias", None)
        pack = Pack(weights, biases, [])
        pack.addresses = [t.data_ptr() for t in (*self._buffers_of(group), *pack.parameters())]
        self.packs = {**(self.packs or {}), group: pack}

    def _hold(self, name: str, parameters: list[nn.Parameter | None], sizes: list[int]) -> None:
        like = next(p for p in parameters if p is not None)
        values = [like.new_zeros(n, *like.shape[1:]) if p is None else p.data for p, n in zip(parameters, sizes)]
        packed, held = torch.cat(values), getattr(self, name, None)
        if held is not None and (held.shape, held.dtype, held.device) == (packed.shape, packed.dtype, packed.device):
            packed = held.copy_(packed)
        self.register_buffer(name, packed, persistent=False)
        for parameter, part in zip(parameters, packed.split(sizes)):
            if parameter is not None:
                parameter.data = part

    def drop_pack(self, group: str) -> None:
        """Forgets a group; its parameters get memory of their own."""
        packs = dict(self.packs or {})
        if group in packs:
            buffers = {buffer.untyped_storage().data_ptr() for buffer in self._buffers_of(group)}
            linears = [_projection(self, name) for name in packs[group].weights]  # may have other parameters by now
            now = [p for linear in linears if isinstance(linear, nn.Module) for p in linear.parameters()]
            for parameter in {id(p): p for p in (*packs.pop(group).parameters(), *now)}.values():
                if _span(parameter) is not None and parameter.data.untyped_storage().data_ptr() in buffers:
                    parameter.data = parameter.data.clone()
            for name in (f"packed_{group}", f"packed_{group}_bias"):
                self._buffers.pop(name, None)
        self.packs = packs or None

    def _buffers_of(self, group: str) -> list[Tensor]:
        names = (f"packed_{group}", f"packed_{group}_bias")
        return [self._buffers[name] for name in names if self._buffers.get(name) is not None]

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)  # moves or casts the parameters one by one, away from each other
        self.keep_packed()
        return self

    def __setstate__(self, state):
        super().__setstate__(state)  # of a copy, whose parameters have been copied one by one
        self.keep_packed()


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, fp32: bool) -> Tensor:
    """x [T, in] times weight [out, in]; with ``fp32`` not rounded to a dtype of two bytes."""
    narrow = x.element_size() == 2
    dtype = torch.float32 if fp32 and narrow else x.dtype
    if x.is_cuda and narrow and (bias is None or fp32):
        product = torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
        skinny_linear(x, weight, product)
        return product if bias is None else product + bias
    return nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def call(linear: Any, x: Tensor) -> Tensor:
    """linear(x) of x [T, in], which few rows have faster than from the module where it is plain."""
    weight, bias = getattr(linear, "weight", None), getattr(linear, "bias", None)
    plain = _is_plain(linear) and type(weight) is nn.Parameter and weight.dtype == x.dtype and not weight.is_meta
    trained = plain and torch.is_grad_enabled() and weight.requires_grad
    return _multiply(x, weight, None, False) if plain and bias is None and not trained else linear(x)


def _projection(layer: Any, name: str) -> Any:
    """The module of that name in ``GROUPS``, or None."""
    return getattr(layer.indexer if name in INDEXER else layer, name, None)


def product(owner: Any, name: str, x: Tensor, made: dict[str, Tensor] | None) -> Tensor:
    """x times the projection ``name`` of ``owner``: as ``products`` made it, or else made by calling."""
    return made[name] if made and name in made else getattr(owner, name)(x)


def unhooked(module: nn.Module) -> bool:
    """Does a call run the forward of its class alone? accelerate and tensor-parallel plans wrap that of an instance."""
    of_all = _global_forward_hooks or _global_forward_pre_hooks
    return not (of_all or module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _is_plain(linear: Any) -> bool:
    """Is a call of it a product with its weight and nothing else?"""
    return type(linear) is nn.Linear and unhooked(linear)


def _can_pack(linear: Any) -> bool:
    if not _is_plain(linear):
        return False
    for parameter in linear._parameters.values():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:  # shards, quantised tensors
            return False
        if parameter.is_meta or parameter.is_inference() or not parameter.is_floating_point():
            return False
    return linear.weight.element_size() > 1


def _layers(model: nn.Module) -> list[PackedProjections]:
    layers = [m for m in model.modules() if isinstance(m, PackedProjections)]
    if not layers:
        raise ValueError(
            f"model is a {type(model).__name__} without SparseAttention; call replace_attention on a transformers "
            "model first"
        )
    return layers


def _span(parameter: Any) -> tuple[int, int] | None:
    """Addresses (first, last) of a plain parameter's elements, which others may share; None for any other."""
    plain = type(parameter) is nn.Parameter and type(parameter.data) is Tensor and not parameter.is_meta
    if not plain or not parameter.numel():
        return None
    extent = sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride()))
    return parameter.data_ptr(), parameter.data_ptr() + extent * parameter.element_size()


def _shared_weights(model: nn.Module) -> set[int]:
    """ids of parameters whose memory, or a part of it, others have too: packed for one, they would leave the other."""
    modules = (module for _, module in model.named_modules(remove_duplicate=False))
    parameters = (parameter for module in modules for parameter in module._parameters.values())
    spans = sorted((*span, id(parameter)) for parameter in parameters if (span := _span(parameter)) is not None)
    shared: set[int] = set()
    end, latest = -1, 0  # of those before, the one that ends last
    for first, last, parameter in spans:
        if first <= end:
            shared |= {latest, parameter}
        if last > end:
            end, latest = last, parameter
    return shared
