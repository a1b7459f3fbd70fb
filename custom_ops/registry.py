"""Where an operator meets its providers.

An op is one schema in the ``compiled_dsa`` library, one check of its arguments, one CPU reference, and any number of
providers: modules with ``refuses(**arguments) -> str | None`` and ``run(**arguments) -> None`` that take the op's
arguments by the names of its schema, those with default values included. Which provider runs is either named by the
caller (keyword ``provider=``) or the first of the op's ordered providers that does not refuse, after which comes the
reference of an op with ``library``; what was asked for by name is never replaced by something else.

A provider whose first call builds or loads something may have a ``warmup(**arguments) -> None``, which ``Op.warmup``
calls; inside a CUDA graph capture it raises RuntimeError where that work would be left to do.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch

from compiled_dsa.custom_ops.capture import SPLIT_OPS, BreakCall, run_or_split

LIBRARY = torch.library.Library("compiled_dsa", "DEF")
OPS: dict[str, "Op"] = {}
REFERENCE = "reference"


@dataclass(frozen=True)
class Op:
    """One registered operator.

    Attributes:
        name: the name under ``torch.ops.compiled_dsa``.
        check: raises ``ValueError`` on arguments outside the contract; runs before every call and while tracing.
        reference: the specification in plain torch, which is also the CPU implementation.
        providers: name -> module path, in the order in which they are tried on a GPU.
        split: True when graphs are cut at this op (it runs between captured segments, not inside one).
        rows: of a split op, place of each argument with one entry a row -> what its padding rows hold after a call
            between segments, None for one that is only read (capture.py).
        arguments: name -> default value, in the order of the schema.
        library: the reference is a library's product, which runs on a GPU where the providers refuse.
    """

    name: str
    check: Callable[..., None]
    reference: Callable[..., None]
    providers: dict[str, str] = field(default_factory=dict)
    split: bool = False
    rows: dict[int, float | None] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    library: bool = False

    @property
    def overload(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.compiled_dsa, self.name).default

    def with_defaults(self, args: tuple) -> tuple:
        """``args`` made whole: torch leaves out trailing arguments that have their default values."""
        return args + tuple(self.arguments.values())[len(args) :]

    def by_name(self, args: tuple) -> dict[str, Any]:
        return dict(zip(self.arguments, self.with_defaults(args), strict=True))

    def names(self) -> tuple[str, ...]:
        return (REFERENCE, *self.providers)

    def candidates(self, device: torch.device) -> tuple[str, ...]:
        """The names tried in order where none was asked for."""
        if device.type == "cpu":
            return (REFERENCE,)
        return (*self.providers, REFERENCE) if self.library else tuple(self.providers)

    def module(self, provider: str) -> ModuleType:
        """A provider's module, imported when first asked for."""
        return importlib.import_module(self.providers[provider])

    def refusal(self, provider: str, *args) -> str | None:
        """Why ``provider`` cannot run these arguments, or None when it can."""
        if provider == REFERENCE:
            return None
        if provider not in self.providers:
            return f"no such provider; {self.name} has {', '.join(self.names())}"
        try:
            module = self.module(provider)
        except ImportError as error:
            if (error.name or "").split(".")[0] == "compiled_dsa":
                raise  # a fault of ours, not a library that is missing
            return f"cannot be imported: {error}"
        return module.refuses(**self.by_name(args))

    def choose(self, provider: str | None, *args) -> str:
        """The name of the provider that serves these arguments.

        Raises:
            ValueError: the provider named refuses, or none of the ordered ones accepts; the message has the reasons.
        """
        reasons = []
        for name in self.candidates(_device(args)) if provider is None else (provider,):
            reason = self.refusal(name, *args)
            if reason is None:
                return name
            reasons.append(f"{name}: {reason}")
        raise ValueError(f"{self.name}: no provider takes these arguments ({'; '.join(reasons)})")

    def warmup(self, provider: str | None, *args) -> None:
        """Does what the first call of a provider with arguments like these would do: builds, loading.

        Nothing for a provider without such work. Others may run once, writing the outputs among ``args``.

        Raises:
            ValueError: as a call with these arguments.
        """
        self.check_all(*args)
        name = self.choose(provider, *args)
        if name != REFERENCE and hasattr(self.module(name), "warmup"):
            with torch.cuda.device_of(next(a for a in args if isinstance(a, torch.Tensor))):
                self.module(name).warmup(**self.by_name(args))

    def check_all(self, *args) -> None:
        """Raises ValueError unless the arguments share a device and keep the op's contract."""
        device = _device(args)
        for name, argument in zip(self.arguments, args):
            if isinstance(argument, torch.Tensor) and argument.device != device:
                raise ValueError(
                    f"{name} is on {argument.device}, other arguments on {device}; all must share a device"
                )
        self.check(**self.by_name(args))

    def __call__(self, *args, provider: str | None = None) -> None:
        self.check_all(*args)
        name = self.choose(provider, *args)
        run = partial(self._call, self.reference if name == REFERENCE else self.module(name).run)
        args = self.with_defaults(args)
        device = _device(args)
        if device.type == "cpu":
            run(*args)
        elif device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._run(run, args)
        else:
            self._run(run, args)

    def _call(self, function: Callable[..., None], *args) -> None:
        function(**self.by_name(args))

    def _run(self, run: Callable[..., None], args: tuple) -> None:
        if self.split:
            run_or_split(BreakCall(self.name, run, args, self.rows))
        else:
            run(*args)


def _device(args: tuple) -> torch.device:
    return next(a.device for a in args if isinstance(a, torch.Tensor))


def define(
    schema: str,
    *,
    check,
    reference,
    providers: dict[str, str],
    split: bool = False,
    rows: dict[str, float | None] | None = None,
    library: bool = False,
) -> Op:
    """Registers an op.

    Args:
        schema: ``name(arguments)`` without the provider argument and the return: every op writes into buffers of its
            caller and returns nothing, so no output can alias an input and the fake has nothing to compute.
        split: annotates the op as one at which graphs are cut.
        rows: of a split op, name of each argument with one entry a row -> what its padding rows hold after a call
            between segments, None for one that is only read.
        library: is the reference a library's product, to run on a GPU where the providers refuse?
    """
    name, arguments = schema.rstrip(")").split("(", 1)
    tags = [torch.Tag.needs_fixed_stride_order] + ([torch.Tag.cudagraph_unsafe] if split else [])
    LIBRARY.define(f"{name}({arguments}, *, str? provider=None) -> ()", tags=tags)
    if split:
        SPLIT_OPS.add(f"compiled_dsa::{name}")
    schema_arguments = getattr(torch.ops.compiled_dsa, name).default._schema.arguments
    defaults = {a.name: a.default_value for a in schema_arguments if not a.kwarg_only}
    places = list(defaults)
    by_place = {places.index(argument): fill for argument, fill in (rows or {}).items()}
    op = Op(name, check, reference, providers, split, by_place, defaults, library)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, op.__call__, key)

    def fake(*args, provider=None):
        op.check_all(*args)

    torch.library.register_fake(f"compiled_dsa::{name}", fake, lib=LIBRARY)
    OPS[name] = op
    return op
