"""Element types of ggml tensors: elements and bytes of a block, by number and name.

Most of the table is the gguf package's. Types that engines know and the package does not yet are
added from ``ggml_blck_size`` and ``ggml_type_size`` of an engine's ``libggml-base`` (0.17 and 0.25
agree).
"""

from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType


@dataclass(frozen=True, slots=True)
class GgmlType:
    """How many elements share a block, and how many bytes the block takes."""

    number: int
    name: str
    block_elements: int
    block_bytes: int

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of ``elements``, which must be a whole number of blocks.

        Raises:
            ValueError: the row does not end at a block's end.
        """
        blocks, rest = divmod(elements, self.block_elements)
        if rest:
            raise ValueError(
                f"a row of {elements} elements is not a whole number of {self.name} blocks "
                f"of {self.block_elements}"
            )
        return blocks * self.block_bytes


_NEWER_THAN_THE_PACKAGE = (GgmlType(42, "Q2_0", 64, 18),)

TYPES_BY_NUMBER: dict[int, GgmlType] = {
    **{entry.number: entry for entry in _NEWER_THAN_THE_PACKAGE},
    **{
        kind.value: GgmlType(kind.value, kind.name, *GGML_QUANT_SIZES[kind])
        for kind in GGMLQuantizationType
        if kind in GGML_QUANT_SIZES
    },
}
TYPES_BY_NAME: dict[str, GgmlType] = {entry.name: entry for entry in TYPES_BY_NUMBER.values()}


def row_bytes(type_name: str, elements: int) -> int:
    """Bytes of one row of ``elements`` of a type, named as ggml (``q8_0``) or GGUF (``Q8_0``) do.

    Raises:
        ValueError: no such type, or the row is not a whole number of blocks.
    """
    kind = TYPES_BY_NAME.get(type_name.upper())
    if kind is None:
        raise ValueError(f"ggml has no element type {type_name!r}")
    return kind.row_bytes(elements)
