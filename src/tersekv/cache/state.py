"""Save and restore stores as dictionaries of tensors and JSON values.

Every class of a store writes its content with `state()` and reads it back with `restore()`.
`restore` is called on an empty object made with the same arguments. For most classes the state is a
list of attributes. A state may come from a forged file. `restore` therefore checks every value
against the class's STATE before using it, and then applies its RULES.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.schema import Check, anything, each, record, refuse, require, shortened
from tersekv.codecs import Codec
from tersekv.tensors import plain

if TYPE_CHECKING:
    from typing_extensions import Self

State = dict[str, Any]
"""Tensors and JSON values by name, and dictionaries and lists of these."""

Spec = Mapping[str, Callable[[Any], Check]]
"""Attribute name -> function that returns the check of the attribute's value."""

Rules = tuple[Callable[[Any, str], None], ...]
"""Functions that raise UserError if an object contradicts itself.

The text is its path in the state.
"""

TENSOR = "tensor"
"""Only key of an entry that represents a tensor."""


class Stateful:
    """An object whose content can be saved, restored and copied.

    STATE: attributes with tensors or JSON values (or dictionaries, lists or named tuples of these),
    and their checks. Checks are built for an object that holds nothing.
    RULES: conditions between attributes, checked after a restore.
    PARTS: attributes that hold a Stateful, a sequence of them, or None.
    HELD: further attributes with tensors or numbers that change, which subclasses save themselves.
    MADE: attributes computed on demand from the others, None before. They may hold addresses, so
    copies start with None.
    """

    STATE: ClassVar[Spec] = {}
    RULES: ClassVar[Rules] = ()
    PARTS: ClassVar[tuple[str, ...]] = ()
    HELD: ClassVar[tuple[str, ...]] = ()
    MADE: ClassVar[tuple[str, ...]] = ()

    def state(self) -> State:
        """Return a copy of everything that future results depend on, except the constructor's
        arguments.

        Tensors are copied, because sending a tensor to another process moves its memory, which
        other tensors may share.
        """
        return own(self.live_state())

    def live_state(self) -> State:
        """Return the same as `state` without copies: tensors may be views of those held."""
        figures = {name: _as_data(getattr(self, name)) for name in self.STATE}
        return figures | {name: [part.live_state() for part in self._parts(name)] for name in self.PARTS}

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a pickle, with copies of tensors, see `state`."""
        return {
            name: None if name in self.MADE else with_tensors(held, Tensor.clone) for name, held in vars(self).items()
        }

    @plain
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that shares nothing with the original."""
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        for name, held in vars(self).items():
            setattr(copied, name, None if name in self.MADE else copy.deepcopy(held, memo))
        return copied

    def schema(self) -> dict[str, Check]:
        """Return the checks of a state's values, except those of the parts."""
        return {name: wanted(self) for name, wanted in self.STATE.items()}

    def restore(self, state: State, place: str = "state") -> None:
        """Restore the content that `state()` returned. Tensors are copied unless a subclass says
        otherwise.

        place: path of this object in the whole state, for error messages.

        Raises:
            UserError: a value is not valid in a state of this object, or values contradict each
                other.
        """
        parts = {name: each(anything, len(self._parts(name))) for name in self.PARTS}
        record(self.schema() | parts)(state, place)
        self._unmake()
        self._hold(state, place)
        for name in self.PARTS:
            for i, part in enumerate(self._parts(name)):
                part.restore(state[name][i], f"{place}.{name}.{i}")
        for rule in self.RULES:
            rule(self, place)

    def _hold(self, state: State, place: str) -> None:
        """Set the attributes to values that were checked individually."""
        for name in self.STATE:
            setattr(self, name, own(state[name]))

    def _unmake(self) -> None:
        for name in self.MADE:
            setattr(self, name, None)

    def _parts(self, name: str) -> Sequence[Stateful]:
        found = getattr(self, name)
        return [] if found is None else [found] if isinstance(found, Stateful) else found

    def _all_parts(self) -> list[Stateful]:
        return [part for name in self.PARTS for part in self._parts(name)]

    # ------------------------------------------------------------------ changing

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows (int64, repeats allowed)."""
        self._map(lambda x: x.index_select(0, rows.to(x.device)))
        for part in self._all_parts():
            part.select(rows)

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        self._map(lambda x: x.to(device))
        for part in self._all_parts():
            part.to(device)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to the tensors in `STATE` and `HELD`."""
        self._unmake()
        for name in (*self.STATE, *self.HELD):
            setattr(self, name, with_tensors(getattr(self, name), fn))

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`, without tables."""
        for part in self._all_parts():
            part.count(footprint)

    def mark(self) -> Any:
        """Return a mark for `undo`.

        Nothing is copied: it is valid as long as attributes are replaced, and never changed in place.
        """
        figures = {name: getattr(self, name) for name in (*self.STATE, *self.HELD)}
        return figures, [part.mark() for part in self._all_parts()]

    def undo(self, mark: Any) -> None:
        """Undo everything since `mark()`."""
        figures, parts = mark
        self.__dict__.update(figures)
        for part, held in zip(self._all_parts(), parts, strict=True):
            part.undo(held)


def _as_data(value: Any) -> Any:
    return _as_data(value._asdict()) if hasattr(value, "_asdict") else _mapped(value, _as_data)


def own(value: Any) -> Any:
    """Return a copy, tensors included."""
    return value.clone() if isinstance(value, Tensor) else _mapped(value, own)


def with_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Apply fn to the tensors in an attribute. Objects with a `__getstate__` of their own are kept."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, Codec):
        return replace(value, fitted=with_tensors(value.fitted, fn))
    if isinstance(value, dict):
        return {key: with_tensors(held, fn) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        held = [with_tensors(part, fn) for part in value]
        return type(value)(*held) if hasattr(value, "_fields") else type(value)(held)
    return value


def split(state: State) -> tuple[State, dict[str, Tensor]]:
    """Replace each tensor of a state by `{"tensor": name}`. Return this state and the tensors by
    name.

    A tensor's name is its path in the state.
    """
    tensors: dict[str, Tensor] = {}

    def place(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            tensors[name] = value
            return {TENSOR: name}
        if isinstance(value, dict):
            return {key: place(held, f"{name}.{key}") for key, held in value.items()}
        if isinstance(value, (list, tuple)):
            return [place(held, f"{name}.{i}") for i, held in enumerate(value)]
        return value

    return {key: place(value, key) for key, value in state.items()}, tensors


def joined(state: Any, tensors: dict[str, Tensor]) -> State:
    """Invert `split`.

    Raises:
        UserError: a tensor is missing, is named nowhere, or is named at the wrong path.
    """
    left = dict(tensors)

    def found(value: Any, place: str) -> Any:
        if isinstance(value, dict) and value.keys() == {TENSOR}:
            require(
                value[TENSOR] == place, place, f"names the tensor {shortened(value[TENSOR])}, and must name its own"
            )
            require(place in left, place, "is missing among the tensors")
            return left.pop(place)
        if isinstance(value, dict):
            return {key: found(held, f"{place}.{key}" if place else key) for key, held in value.items()}
        return [found(held, f"{place}.{i}") for i, held in enumerate(value)] if isinstance(value, list) else value

    whole = found(state, "")
    require(isinstance(whole, dict), "the state", "must be a dictionary")
    if left:
        refuse(next(iter(left)), "is a tensor that the state does not name")
    return whole


def _mapped(value: Any, fn: Any) -> Any:
    """Apply fn to the items of a dictionary, list or tuple. Return anything else unchanged."""
    if isinstance(value, dict):
        return {key: fn(held) for key, held in value.items()}
    return [fn(held) for held in value] if isinstance(value, (list, tuple)) else value
