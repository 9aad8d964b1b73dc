"""The numbers of an architecture as the GGUF header tells them, checked before use."""

from collections.abc import Mapping
from dataclasses import dataclass

from linkcpp.common.errors import LinkcppError
from linkcpp.model.header import Value

LARGEST_NUMBER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Architecture:
    """Reads ``<architecture>.<key>`` from a model's key-value pairs.

    Raises ``LinkcppError`` by name where a number is missing, no whole number, or out of range.
    """

    source: str
    name: str
    metadata: Mapping[str, Value]

    def number(self, key: str, default: int | None = None) -> int:
        """One whole number; of a per-layer array the largest."""
        value = self.metadata.get(f"{self.name}.{key}")
        if isinstance(value, tuple):
            return max((self._checked(key, item) for item in value), default=0)
        if value is None and default is not None:
            return default
        return self._checked(key, value)

    def positive(self, key: str) -> int:
        """One whole number that cannot be 0."""
        return self._not_zero(key, self.number(key))

    def positive_of_layer(self, key: str, layer: int) -> int:
        """The number for one layer, which must be there and cannot be 0."""
        if not self.has(key):
            raise self._wrong(key, "it is missing")
        return self._not_zero(key, self.layer_number(key, layer, 0))

    def layer_number(self, key: str, layer: int, default: int) -> int:
        """The number for one layer, where the key may hold one value or one value a layer."""
        value = self.metadata.get(f"{self.name}.{key}")
        if isinstance(value, tuple):
            if layer >= len(value):
                raise self._wrong(key, f"it has {len(value)} values, but there is layer {layer}")
            return self._checked(key, value[layer])
        return default if value is None else self._checked(key, value)

    def has(self, key: str) -> bool:
        """Whether the model says anything about the key."""
        return f"{self.name}.{key}" in self.metadata

    def raw(self, key: str) -> Value:
        """The value as the header has it."""
        return self.metadata.get(f"{self.name}.{key}")

    def _checked(self, key: str, value: object) -> int:
        if isinstance(value, int) and 0 <= value <= LARGEST_NUMBER:
            return int(value)
        if value is None:
            raise self._wrong(key, "it is missing")
        raise self._wrong(key, f"{str(value)[:40]} is not a sensible number")

    def _not_zero(self, key: str, number: int) -> int:
        if not number:
            raise self._wrong(key, "0 is not a sensible number")
        return number

    def _wrong(self, key: str, why: str) -> LinkcppError:
        return LinkcppError(
            f"{self.source} cannot be used: {self.name}.{key}: {why}.",
            hint="Download the model again, or convert it anew.",
        )
