"""Operators and their kernels.

An operator is a torch function, its reference, made by `@operator`; kernels join it by `@name.by(backend)`. With a
schema it is also a torch operator, `torch.ops.tersekv.<name>`, that profilers and `torch.compile` see. A call runs the
first kernel that takes it, in the order C++, Triton, reference; a kernel says why it does not take a call by raising
`NotTaken`.

`TERSEKV_BACKEND=auto|cpu|triton|reference` or `with forced("cpu")` takes the choice away: a forced backend runs or
raises. `backends` imports all operators and kernels; callers take them from there.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
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
"""Backends in the order in which they are asked."""

BACKEND_VARIABLE, AUTO = "TERSEKV_BACKEND", "auto"

_forced: ContextVar[str | None] = ContextVar("tersekv_backend", default=None)
NOT_BUILT = "native kernels are not built"
"""How a reason begins where the extension is missing."""

_logged: set[tuple[str, str]] = set()
"""Fallbacks to the reference that were logged, by operator and reason."""

OPERATORS: dict[str, Operator] = {}
"""Every operator by its name."""

_library = torch.library.Library(NAMESPACE, "DEF")


class NotTaken(Exception):  # noqa: N818 (no error: another kernel takes the call)
    """Why a kernel does not take a call; another one does."""


class Operator:
    """A function of tensors with several implementations; called like its reference.

    schema: of the torch operator, "(Tensor x, …) -> …", None where an argument is no tensor, number or list of them.
    Named tuples among the reference's parameters are spread over the schema's. fake: results for `torch.compile`,
    tensors of the right shape without contents, from the schema's arguments.
    """

    def __init__(self, reference: Callable[..., Any], schema: str | None, fake: Callable[..., Any] | None) -> None:
        functools.update_wrapper(self, reference)
        self.name, self.reference = reference.__name__, reference
        self.kernels: dict[str, Callable[..., Any]] = {}
        self.order: list[str] = []  # backends with a kernel, in the order in which they are asked
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
        """What the reference gives, by the first kernel that takes the call."""
        if named:
            args = inspect.signature(self.reference).bind(*args, **named).args
        if self.torch_operator is None:
            return self.run(*args)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(args)):
            return self.run(*args)  # the reference's own gradients
        flat: list[Any] = []
        for of, value in zip(self._tuples, args, strict=True):
            flat.extend(value) if of is not None else flat.append(value)
        out = self.torch_operator(*flat)
        return out if self._result is None else self._result(*out)

    def _unflattened(self, *flat: Any) -> Any:
        """The schema's arguments as the reference takes them."""
        rest, args = iter(flat), []
        for of in self._tuples:
            args.append(next(rest) if of is None else of(*(next(rest) for _ in of._fields)))
        out = self.run(*args)
        return tuple(out) if self._result is not None else out

    def by(self, backend: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Make a function the kernel of a backend. It raises `NotTaken` for calls that it does not take."""

        def join(run: Callable[..., Any]) -> Callable[..., Any]:
            self.kernels[backend] = run
            self.order = [name for name in ORDER if name in self.kernels]
            return run

        return join

    def run(self, *args: Any) -> Any:
        """The same without torch's dispatcher."""
        reasons: list[str] = []
        out = self.direct(*args, reasons=reasons)
        if out is not None:
            return out
        if reasons:
            _log_fallback(self.name, "; ".join(reasons))
        return self.reference(*args)

    def direct(self, *args: Any, reasons: list[str] | None = None) -> Any:
        """The result of the first kernel that takes the call; None where only the reference does. A forced backend
        without a kernel for this operator leaves it to the reference.

        Args:
            reasons: takes why each kernel did not take the call.

        Raises:
            UserError: a backend is forced and does not take it.
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
    """Make a function an operator with itself as the reference; see `Operator`."""

    def make(reference: Callable[..., Any]) -> Operator:
        made = OPERATORS[reference.__name__] = Operator(reference, schema, fake)
        return made

    return make


def like_first(x: Tensor, *rest: Any) -> Tensor:
    """A fake result: of the first argument's shape and type."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def chosen() -> str:
    """The forced backend's name, or "auto"."""
    return _forced.get() or _from_environment()


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Run operators on one backend ("auto" for the usual choice) in this thread or task."""
    token = _forced.set(_checked(name, "backend"))
    try:
        yield
    finally:
        _forced.reset(token)


@functools.cache
def _from_environment() -> str:
    """The variable's value, read once per process."""
    return _checked(os.environ.get(BACKEND_VARIABLE) or AUTO, BACKEND_VARIABLE)


def _checked(name: str, origin: str) -> str:
    allowed = (AUTO, *ORDER)
    if name not in allowed:
        raise UserError(f"{origin}: got {name!r}, allowed are {', '.join(allowed)}")
    return name


def _log_fallback(name: str, reasons: str) -> None:
    """Log each reason once; a warning where there are no kernels at all, which is many times slower."""
    missing = reasons.split("cpu: ", 1)[1] if "cpu: " + NOT_BUILT in reasons else None
    if missing is not None:
        name, reasons = "", missing
    if (name, reasons) in _logged:
        return
    _logged.add((name, reasons))
    if missing is not None:
        log.warning("the C++ kernels cannot be used, and torch does their work many times slower: %s", missing)
    else:
        log.info("%s runs on the torch reference (%s)", name, reasons)
