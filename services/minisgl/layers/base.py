"""Plain operators with a recursive `state_dict`, and how each finds its weights in a checkpoint."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a checkpoint, the part of it that this rank holds, and where that goes.

    Several pieces fill one parameter where it is merged (Q, K and V; the experts). What no piece
    fills stays zero: that is the padding.
    """

    source: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Full shape there."""
    take: tuple[slice, ...]
    """This rank's part; empty slices where it holds none of it."""
    target: str
    """Name of the parameter in `state_dict`."""
    put: tuple[int | slice, ...]
    """The region of the parameter that the part fills."""


class BaseOP:
    """A part of a model: its tensors are parameters, its operators are children.

    Parameters are made on the meta device; `load_state_dict` puts real ones in their place.
    Attributes that start with an underscore are neither (constants, references to other parts).
    """

    def state_dict(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """All parameters below this operator, by name as in a checkpoint, `prefix` before it."""
        found: dict[str, torch.Tensor] = {}
        for name, value in self._public():
            if isinstance(value, torch.Tensor):
                found[prefix + name] = value
            elif isinstance(value, BaseOP):
                found.update(value.state_dict(f"{prefix}{name}."))
        return found

    def load_state_dict(self, state: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Take the parameters from `state`, without a copy.

        `KeyError` names one that is missing, `ValueError` one whose shape differs.
        """
        for name, value in self._public():
            if isinstance(value, torch.Tensor):
                new = state[prefix + name]
                if new.shape != value.shape:
                    raise ValueError(
                        f"{prefix}{name} has shape {tuple(value.shape)}, not {tuple(new.shape)}"
                    )
                setattr(self, name, new)
            elif isinstance(value, BaseOP):
                value.load_state_dict(state, f"{prefix}{name}.")

    def pieces(self, prefix: str = "") -> Iterator[Piece]:
        """What to read from a checkpoint. By default each parameter whole, under its own name."""
        for name, value in self._public():
            if isinstance(value, torch.Tensor):
                whole = tuple(slice(0, n) for n in value.shape)
                yield Piece(prefix + name, tuple(value.shape), whole, prefix + name, whole)
            elif isinstance(value, BaseOP):
                yield from value.pieces(f"{prefix}{name}.")

    def _public(self) -> Iterable[tuple[str, object]]:
        return [(name, value) for name, value in vars(self).items() if name[0] != "_"]


class OPList(BaseOP):
    """Operators in a row, named 0, 1, 2, ..."""

    def __init__(self, ops: Iterable[BaseOP]) -> None:
        self._ops = list(ops)

    def _public(self) -> Iterable[tuple[str, object]]:
        return [(str(i), op) for i, op in enumerate(self._ops)]
