"""Operators and their kernels.

An operator is made from a torch function, its reference, by `@operator`. Kernels are registered by
`@name.by(backend)`. With a schema it is also a torch operator, `torch.ops.tersekv.<name>`, which
profilers and `torch.compile` see. A call runs the first kernel that supports it, in the order C++,
Triton, reference. A kernel that does not support a call raises `NotTaken` with the reason.

`TERSEKV_BACKEND=auto|cpu|triton|reference` or `with forced("cpu")` forces a backend, which then
runs or raises. `backends` imports all operators and kernels; callers import them from there.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tersekv.errors import UserError

log = logging.getLogger(__name__)

NAMESPACE = "tersekv"
REFERENCE = "reference"
ORDER = ("cpu", "triton", REFERENCE)
"""Backends in the order in which they are tried."""

BACKEND_VARIABLE, AUTO = "TERSEKV_BACKEND", "auto"

_forced: ContextVar[str | None] = ContextVar("tersekv_backend", default=None)
NOT_BUILT = "native kernels are not built"
"""Beginning of the reason if the extension is missing."""

_logged: set[tuple[str, str]] = set()
"""Fallbacks to the reference that were already logged, by operator and reason."""

OPERATORS: dict[str, Operator] = {}
"""All operators by name."""

_library = torch.library.Library(NAMESPACE, "DEF")


class NotTaken(Exception):  # noqa: N818 (not an error: another kernel runs the call)
    """Raised by a kernel, with the reason, for a call that it does not support; another one runs
    it."""


class Operator:
    """A function of tensors with several implementations; called like its reference.

    schema: of the torch operator, "(Tensor x, …) -> …". None if an argument is not a tensor, a
    number or a list of them. The fields of a named tuple among the reference's parameters are
    separate arguments in the schema.

    fake: result for `torch.compile`, tensors of the right shape without contents, from the schema's
    arguments.
    """

    def __init__(self, reference: Callable[..., Any], schema: str | None, fake: Callable[..., Any] | None) -> None:
        functools.update_wrapper(self, reference)
        self.name, self.reference = reference.__name__, reference
        self.kernels: dict[str, Callable[..., Any]] = {}
        self.order: list[str] = []  # backends with a kernel, in the order in which they are tried
        self.torch_operator: Any = None
        if schema is None:
            return
        names = list(inspect.signature(reference).parameters)
        hints = get_type_hints(reference)
        self._tuples = [hints[name] if hasattr(hints[name], "_fields") else None for name in names]
        self._result = hints["return"] if hasattr(hints["return"], "_fields") else None
        _library.define(self.name + schema)
        _library.impl(self.name, self._unflattened, "CompositeExplicitAutograd")
        if fake is not None:
            torch.library.register_fake(f"{NAMESPACE}::{self.name}", fake, lib=_library)
        self.torch_operator = getattr(getattr(torch.ops, NAMESPACE), self.name).default

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Return the reference's result, computed by the first kernel that supports the call."""
        if named:
            args = inspect.signature(self.reference).bind(*args, **named).args
        if self.torch_operator is None:
            return self.run(*args)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(args)):
            return self.run(*args)  # so that autograd can run through the reference
        flat: list[Any] = []
        for of, value in zip(self._tuples, args, strict=True):
            flat.extend(value) if of is not None else flat.append(value)
        out = self.torch_operator(*flat)
        return out if self._result is None else self._result(*out)

    def _unflattened(self, *flat: Any) -> Any:
        """Convert the schema's arguments to the reference's and run."""
        rest, args = iter(flat), []
        for of in self._tuples:
            args.append(next(rest) if of is None else of(*(next(rest) for _ in of._fields)))
        out = self.run(*args)
        return tuple(out) if self._result is not None else out

    def by(self, backend: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a function as the kernel of a backend. It raises `NotTaken` for calls that it
        does not support."""

        def join(run: Callable[..., Any]) -> Callable[..., Any]:
            self.kernels[backend] = run
            self.order = [name for name in ORDER if name in self.kernels]
            return run

        return join

    def run(self, *args: Any) -> Any:
        """Run the call without torch's dispatcher."""
        reasons: list[str] = []
        out = self.direct(*args, reasons=reasons)
        if out is not None:
            return out
        if reasons:
            _log_fallback(self.name, "; ".join(reasons))
        return self.reference(*args)

    def direct(self, *args: Any, reasons: list[str] | None = None) -> Any:
        """Return the result of the first kernel that supports the call; None if only the reference
        does.

        A forced backend that has no kernel for this operator also returns None.

        Args:
            reasons: list to which the reason of each kernel that did not run is appended.

        Raises:
            UserError: a backend is forced and does not support the call.
        """
        only = _forced.get() or _from_environment()
        for name in self.order:
            if only not in (AUTO, name):
                continue
            try:
                return self.kernels[name](*args)
            except NotTaken as reason:
                if only == name:
                    raise UserError(f"backend {name!r} is forced and cannot run {self.name}: {reason}") from None
                if reasons is not None:
                    reasons.append(f"{name}: {reason}")
        return None


def operator(schema: str | None = None, fake: Callable[..., Any] | None = None) -> Callable[..., Operator]:
    """Make a function an operator, with the function as its reference; see `Operator`."""

    def make(reference: Callable[..., Any]) -> Operator:
        made = OPERATORS[reference.__name__] = Operator(reference, schema, fake)
        return made

    return make


def like_first(x: Tensor, *rest: Any) -> Tensor:
    """Fake result with the shape and type of the first argument."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def chosen() -> str:
    """Return the forced backend's name, or "auto"."""
    return _forced.get() or _from_environment()


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Run operators on one backend ("auto" for the usual choice) in this thread or asyncio task."""
    token = _forced.set(_checked(name, "backend"))
    try:
        yield
    finally:
        _forced.reset(token)


@functools.cache
def _from_environment() -> str:
    """Return the variable's value, which is read once per process."""
    return _checked(os.environ.get(BACKEND_VARIABLE) or AUTO, BACKEND_VARIABLE)


def _checked(name: str, origin: str) -> str:
    allowed = (AUTO, *ORDER)
    if name not in allowed:
        raise UserError(f"{origin}: {name!r} is not a valid backend; allowed are {', '.join(allowed)}")
    return name


def _log_fallback(name: str, reasons: str) -> None:
    """Log each reason once. If there are no native kernels, warn once instead, because torch is
    many times slower and an unconfigured log shows nothing."""
    missing = reasons.split("cpu: ", 1)[1].split("; triton: ")[0] if "cpu: " + NOT_BUILT in reasons else None
    if missing is not None:
        name, reasons = "", missing
    if (name, reasons) in _logged:
        return
    _logged.add((name, reasons))
    if missing is not None:
        warnings.warn(f"tersekv runs on torch, which is many times slower: {missing}", RuntimeWarning, stacklevel=2)
    else:
        log.info("%s runs on the torch reference (%s)", name, reasons)
