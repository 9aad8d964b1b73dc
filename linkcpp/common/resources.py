"""Data that ships with linkcpp: ``templates/`` and ``plans/`` of the repository."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def resource_folder(name: str) -> Path:
    """Find the folder ``templates`` or ``plans``.

    An installed wheel carries them inside the package; an editable install reads them from the
    top of the checkout.
    """
    packaged = _PACKAGE / name
    return packaged if packaged.is_dir() else _PACKAGE.parent / name
