"""Weights of linear layers as models bring them: plain, fp8 with block scales, LoRA adapters, tensor-parallel shards.

A projection is called as a module, whatever it is. Absorption, and products in fp32, need the matrix that such a call
multiplies with; it is found here. Layers of other libraries are recognised by their attributes, so that none of these
is imported:

- ``weight_scale_inv``: transformers' ``FP8Linear``, e4m3 codes times one scale a block of ``block_size``;
- ``base_layer``, ``lora_A``, ``get_delta_weight``: peft's LoRA layers;
- ``to_local``: torch's ``DTensor``, of which every rank uses its own rows.

Legend: H heads of this rank, N nope dim, V value dim, L latent dim.
"""

import copy
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
BLOCK = 128  # of activations, and of weights whose layer names no block_size


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor-parallel parameter; any other tensor as it is."""
    return tensor.to_local() if _is_shard(tensor) else tensor


def _is_shard(tensor: Any) -> bool:
    return hasattr(type(tensor), "to_local")  # of the type: the only question that Dynamo answers right


def is_fp8(linear: Any) -> bool:
    """Are the values of ``linear`` e4m3 codes with scales?"""
    return getattr(linear, "weight_scale_inv", None) is not None and linear.weight.dtype == FP8


def is_adapted(linear: Any) -> bool:
    """Is ``linear`` a LoRA layer around another layer?"""
    return all(hasattr(linear, name) for name in ("base_layer", "lora_A", "lora_B", "get_delta_weight"))


def is_readable(linear: Any) -> bool:
    """Does ``effective_weight`` know all that a call of ``linear`` does?

    False with hooks, a bias, weights that are elsewhere until the call, layers of other kinds, and adapters that are
    more than an added matrix (DoRA, a bias, dropout in training) or lie on sharded weights.
    """
    base = linear.base_layer if is_adapted(linear) else linear
    if any(m._forward_hooks or m._forward_pre_hooks for m in (linear, base)):
        return False
    known = type(base) is nn.Linear or (isinstance(base, nn.Linear) and hasattr(base, "weight_scale_inv"))
    if not known or base.bias is not None or not (base.weight.element_size() > 1 or is_fp8(base)):
        return False
    if base.weight.is_meta and hasattr(base, "_hf_hook"):  # accelerate's offloading
        return False
    if base is linear:
        return True
    if _is_shard(base.weight):
        return False
    if linear.merged:
        return not linear.disable_adapters  # else the next call takes the adapter out of the weight again
    return all(_is_added_matrix(linear, name) for name in _active(linear))


def _active(linear: Any) -> list[str]:
    if linear.disable_adapters or linear.merged:
        return []
    return [name for name in linear.active_adapters if name in linear.lora_A]


def _is_added_matrix(linear: Any, name: str) -> bool:
    variants = name in getattr(linear, "lora_variant", {}) or getattr(linear, "use_dora", {}).get(name, False)
    dropout = linear.training and getattr(linear.lora_dropout[name], "p", 0.0) > 0
    return not variants and not dropout and linear.lora_B[name].bias is None


def effective_weight(linear: Any, dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] in ``dtype`` with which a call of a readable ``linear`` multiplies; of a shard, this rank's
    rows."""
    base = linear.base_layer if is_adapted(linear) else linear
    weight = local(base.weight)
    if is_fp8(base):
        weight = dequantize_weight(weight, local(base.weight_scale_inv), getattr(base, "block_size", None), dtype)
    if base is not linear:
        for name in _active(linear):
            weight = weight + linear.get_delta_weight(name).to(torch.promote_types(weight.dtype, dtype))
    return weight.to(dtype)


def dequantize_weight(weight: Tensor, scale: Tensor, block_size: Any, dtype: torch.dtype) -> Tensor:
    """e4m3 [out, in] times a scale a block; multiplied in fp32, then rounded to ``dtype``.

    Args:
        scale: [ceil(out / rows), ceil(in / columns)] of fp32 or e8m0, or one value.
        block_size: (rows, columns); None: 128 by 128.

    Raises:
        ValueError: scales of another shape.
    """
    scale = scale.float()
    if scale.numel() > 1:
        sizes = block_size or (BLOCK, BLOCK)
        blocks = tuple(-(-n // b) for n, b in zip(weight.shape, sizes))
        if tuple(scale.shape) != blocks:
            raise ValueError(
                f"weight_scale_inv has shape {tuple(scale.shape)}; weights {tuple(weight.shape)} in blocks of "
                f"{tuple(sizes)} have {blocks}"
            )
        for dim, (n, b) in enumerate(zip(weight.shape, sizes)):
            scale = scale.repeat_interleave(b, dim).narrow(dim, 0, n)
    return (weight.float() * scale).to(dtype)


def dequantize_rows(pair: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Activations [T, hidden] in ``dtype`` of a pair (e4m3 [T, hidden], fp32 scales [T, ceil(hidden / 128)]).

    Raises:
        ValueError: not such a pair.
    """
    if len(pair) != 2:
        raise ValueError(f"x has {len(pair)} tensors; a pair is (e4m3 values, scales)")
    values, scale = pair
    if values.dtype != FP8 or values.dim() != 2:
        raise ValueError(f"x[0] is {values.dtype} of {values.dim()} dims; it must be {FP8} [T, hidden]")
    T, hidden = values.shape
    if tuple(scale.shape) != (T, -(-hidden // BLOCK)):
        shape = (T, -(-hidden // BLOCK))
        raise ValueError(f"x[1] has shape {tuple(scale.shape)}; the scales of {BLOCK} values each must be {shape}")
    return (values.float() * scale.float().repeat_interleave(BLOCK, 1)[:, :hidden]).to(dtype)


def up_projection(linear: Any, head_rows: int, dtype: torch.dtype) -> Tensor:
    """[H, N + V, L]: the matrix of ``kv_b_proj``, a head's ``head_rows`` = N + V rows together.

    Where ``hold_weight`` was called, what it keeps; else made anew from fp8 or adapters.
    """
    if getattr(linear, "held_weight", None) is None:
        weight = effective_weight(linear, dtype)
    else:
        if not torch.compiler.is_compiling():
            hold_weight(linear, dtype)
        weight = linear.held_weight
    return weight.unflatten(0, (-1, head_rows))


def hold_weight(linear: Any, dtype: torch.dtype) -> None:
    """Keeps the effective weight of an fp8 or adapted layer in its buffer ``held_weight``, which is not saved.

    Compiled code and CUDA graphs read the buffer where it is, and do not look at what it was made from: call this
    before each forward (``replace_attention`` does). It costs a comparison until weights, scales or adapters change,
    by assignment or in place; then the buffer is written again, at the same address. Changes through ``.data`` are not
    seen. A plain layer, or one that is not readable any more, holds nothing.
    """
    if type(linear) is nn.Linear and "held_weight" not in linear._buffers:
        return  # at every layer and step of most models, so without more ado
    if not (is_adapted(linear) or is_fp8(linear)) or not is_readable(linear):
        if getattr(linear, "held_weight", None) is not None:
            del linear.held_weight, linear.held_state
        return
    state = _State(linear, dtype)
    held = getattr(linear, "held_weight", None)
    if held is not None and linear.held_state.key == state.key and held.data_ptr() == linear.held_address:
        return
    with torch.no_grad(), torch.inference_mode(False):  # graphs and other grad modes read it too
        weight = effective_weight(linear, dtype)
        if held is not None and (held.shape, held.dtype, held.device) == (weight.shape, weight.dtype, weight.device):
            held.copy_(weight)
        else:
            linear.register_buffer("held_weight", weight.clone(), persistent=False)
    linear.held_state, linear.held_address = state, linear.held_weight.data_ptr()


class _State:
    """Differs whenever the effective weight does. Holds the tensors, so that another one cannot get an id of theirs."""

    def __init__(self, linear: Any, dtype: torch.dtype):
        base = linear.base_layer if is_adapted(linear) else linear
        self.tensors = [base.weight] + ([base.weight_scale_inv] if is_fp8(base) else [])
        adapters: list = []
        if base is not linear:
            adapters = [tuple(linear.merged_adapters)]  # merging writes through .data
            for name in _active(linear):
                self.tensors += [linear.lora_A[name].weight, linear.lora_B[name].weight]
                adapters.append((name, linear.scaling[name]))
        self.key = dtype, [(id(t), local(t).data_ptr(), _version(local(t))) for t in self.tensors], adapters


def _version(tensor: Tensor) -> object:
    """Counts writes in place. Tensors made in inference mode count none: for them, never the same twice."""
    return object() if tensor.is_inference() else tensor._version


class AdapterWatch:
    """Notices that adapters anywhere in a model are not those that it had when this was made.

    Adapters may be on any modules, and single ones may be switched: so the flags of all are compared. A module that
    gets its first adapter has no flags yet: another takes its place. So the children of all modules are compared too,
    as dicts and not in Python, and only when some have changed a walk over the modules tells whether adapters have.
    Without adapters that is 0.05 ms a step of 61 layers, with 548 of them 0.7, on two slow cores; ``hold_weight`` takes
    7 where they are on every ``kv_b_proj``. (torch's hook for assigned modules would count these for nothing, but
    traced code is guarded on that hook.)
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._parts = self._parts_now()
        self._look_at_children()
        self._flags = [(m, _flag_reader(m)) for m in self._parts if _is_switchable(m)]
        self._before = [tuple(copy.copy(flag) for flag in read(m)) for m, read in self._flags]  # they change in place

    def changed(self) -> bool:
        """Were adapters added, removed, switched, disabled, merged or scaled since, and not changed back?"""
        if self._children != self._children_before:
            if self._parts_now() != self._parts:
                return True
            self._look_at_children()  # others than adapters
        return [read(m) for m, read in self._flags] != self._before

    def _look_at_children(self) -> None:
        # the modules' own dicts, but for empty ones: adapters replace modules, or join others in the dicts of a layer
        self._children = [m._modules for m in self._model.modules() if m._modules]
        self._children_before = [dict(children) for children in self._children]

    def _parts_now(self) -> list[nn.Module]:
        """Adapted modules and what they consist of: an adapter that is removed and added again has others."""
        return [part for m in self._model.modules() if _is_switchable(m) for part in m.modules()]


def _is_switchable(module: nn.Module) -> bool:
    """Is it a layer of peft's, LoRA or not, or its wrapper of modules that are trained whole?"""
    # of whole models disable_adapters is a method
    return isinstance(getattr(module, "disable_adapters", None), bool) and hasattr(module, "active_adapter")


def _flag_reader(module: nn.Module) -> Callable[[nn.Module], tuple]:
    names = "active_adapter", "disable_adapters", "merged_adapters", "scaling"
    return attrgetter(*(name for name in names if hasattr(module, name)))
