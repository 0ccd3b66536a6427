"""What a store holds, as data: named tensors and JSON values in dictionaries, from which an equal store is made again.

Every class of a store gives it in `state()` and takes it back in `restore()`, on an object that was made with the same
arguments and holds nothing. For most it is a list of attributes. A state may come from a file that somebody has forged,
so `restore` checks every value by the class's STATE before it is used, and then its RULES.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from tersekv.cache.schema import Check, anything, each, record, refuse, require, shortened
from tersekv.codecs import Codec
from tersekv.tensors import plain

if TYPE_CHECKING:
    from typing_extensions import Self

State = dict[str, Any]
"""By name: tensors, JSON values, and dictionaries and lists of these."""

Spec = Mapping[str, Callable[[Any], Check]]
"""Attributes by name, with what each may be."""

Rules = tuple[Callable[[Any, str], None], ...]
"""What raises a UserError about an object that contradicts itself; the text is its place in the whole state."""

TENSOR = "tensor"
"""The only key of an entry that stands for a tensor."""


RENAMED = {"seen": "num_tokens", "dropped": "num_evicted", "waits": "deferred"}
"""Names of values in files that earlier versions wrote, and their names now."""


class Stateful:
    """STATE: attributes that hold tensors or JSON values (or dictionaries, lists or named tuples of these), and what
    each may be, asked of an object that holds nothing. RULES: what they must have in common, asked of one that was
    restored. PARTS:
    attributes that hold a Stateful, a sequence of them, or None. MADE: attributes that are made of the others when they
    are asked for, and None before; they may hold addresses, so copies begin with None."""

    STATE: ClassVar[Spec] = {}
    RULES: ClassVar[Rules] = ()
    PARTS: ClassVar[tuple[str, ...]] = ()
    MADE: ClassVar[tuple[str, ...]] = ()

    def state(self) -> State:
        """A copy of everything that the future depends on, but for the arguments it was made with. It is a copy because
        sending a tensor to another process moves its memory, also under other tensors that share it."""
        return own(self.live_state())

    def live_state(self) -> State:
        """The same without copying: tensors may be views of those that are held."""
        figures = {name: _as_data(getattr(self, name)) for name in self.STATE}
        return figures | {name: [part.live_state() for part in self._parts(name)] for name in self.PARTS}

    def __getstate__(self) -> dict[str, Any]:
        """Attributes for a pickle, with copies of tensors, see `state`."""
        return {name: None if name in self.MADE else _own_tensors(held) for name, held in vars(self).items()}

    @plain
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that shares nothing."""
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        for name, held in vars(self).items():
            setattr(copied, name, None if name in self.MADE else copy.deepcopy(held, memo))
        return copied

    def schema(self) -> dict[str, Check]:
        """What each value of a state may be, but for those of the parts."""
        return {name: wanted(self) for name, wanted in self.STATE.items()}

    def restore(self, state: State, place: str = "state") -> None:
        """Hold what `state()` gave; tensors are copied unless it says otherwise. place: where errors say it is.

        Raises:
            UserError: a value that no state of this object has, or values that contradict each other.
        """
        parts = {name: each(anything, len(self._parts(name))) for name in self.PARTS}
        state = {RENAMED.get(name, name): value for name, value in state.items()}
        record(self.schema() | parts)(state, place)
        self._unmake()
        self._hold(state, place)
        for name in self.PARTS:
            for i, part in enumerate(self._parts(name)):
                part.restore(state[name][i], f"{place}.{name}.{i}")
        for rule in self.RULES:
            rule(self, place)

    def _hold(self, state: State, place: str) -> None:
        """Take the values that were checked, each by itself."""
        for name in self.STATE:
            setattr(self, name, own(state[name]))

    def _unmake(self) -> None:
        for name in self.MADE:
            setattr(self, name, None)

    def _parts(self, name: str) -> Sequence[Stateful]:
        found = getattr(self, name)
        return [] if found is None else [found] if isinstance(found, Stateful) else found


def _as_data(value: Any) -> Any:
    return _as_data(value._asdict()) if hasattr(value, "_asdict") else _mapped(value, _as_data)


def own(value: Any) -> Any:
    """A copy, tensors included."""
    return value.clone() if isinstance(value, Tensor) else _mapped(value, own)


def _own_tensors(value: Any) -> Any:
    """An attribute with copies of the tensors in it; objects with a `__getstate__` of their own stay."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Codec):
        return replace(value, fitted=_own_tensors(value.fitted))
    if isinstance(value, dict):
        return {key: _own_tensors(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        held = [_own_tensors(part) for part in value]
        return type(value)(*held) if hasattr(value, "_fields") else type(value)(held)
    return value


def split(state: State) -> tuple[State, dict[str, Tensor]]:
    """The state with `{"tensor": name}` in place of each tensor, and the tensors by name: their places in the state."""
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
    """Inverse of `split`.

    Raises:
        UserError: a tensor that is missing, or that nothing or something else in the state names.
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
    require(isinstance(whole, dict), "the state", "must have entries by name")
    if left:
        refuse(next(iter(left)), "is a tensor that the state does not name")
    return whole


def _mapped(value: Any, fn: Any) -> Any:
    """fn of what a dictionary, list or tuple holds; anything else as it is."""
    if isinstance(value, dict):
        return {key: fn(held) for key, held in value.items()}
    return [fn(held) for held in value] if isinstance(value, (list, tuple)) else value
