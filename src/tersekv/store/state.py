"""What a store holds, as data: named tensors and JSON values in dictionaries, from which an equal store is made again.

Every class of a store gives it in `state()` and takes it back in `restore()`, on an object that was made with the same
arguments and holds nothing. For most it is a list of attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

State = dict[str, Any]
"""By name: tensors, JSON values, and dictionaries and lists of these."""

TENSOR = "tensor"
"""The only key of an entry that stands for a tensor."""


class Stateful:
    """STATE: attributes that hold tensors or JSON values (or dictionaries, lists or named tuples of these). PARTS:
    attributes that hold a Stateful, a sequence of them, or None. MADE: attributes that are made of the others when they
    are asked for, and None before; they may hold addresses, and whoever gets a state may move its tensors into memory
    that processes share, so that they are made anew."""

    STATE: ClassVar[tuple[str, ...]] = ()
    PARTS: ClassVar[tuple[str, ...]] = ()
    MADE: ClassVar[tuple[str, ...]] = ()

    def state(self) -> State:
        """Everything that the future depends on, but for the arguments it was made with. Tensors may be views."""
        self._unmake()
        figures = {name: _as_data(getattr(self, name)) for name in self.STATE}
        return figures | {name: [part.state() for part in self._parts(name)] for name in self.PARTS}

    def restore(self, state: State) -> None:
        """Hold what `state()` gave; tensors are copied unless it says otherwise."""
        self._unmake()
        for name in self.STATE:
            setattr(self, name, own(state[name]))
        for name in self.PARTS:
            for part, its_state in zip(self._parts(name), state[name], strict=True):
                part.restore(its_state)

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


def joined(state: Any, tensors: dict[str, Tensor]) -> Any:
    """Inverse of `split`."""
    if isinstance(state, dict) and state.keys() == {TENSOR}:
        return tensors[state[TENSOR]]
    return _mapped(state, lambda value: joined(value, tensors))


def _mapped(value: Any, fn: Any) -> Any:
    """fn of what a dictionary, list or tuple holds; anything else as it is."""
    if isinstance(value, dict):
        return {key: fn(held) for key, held in value.items()}
    return [fn(held) for held in value] if isinstance(value, (list, tuple)) else value
