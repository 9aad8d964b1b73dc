"""The folder in which a hub keeps everything."""

from pathlib import Path

from linkcpp.common.errors import LinkcppError


def make_data_folder(data: Path) -> None:
    """Make a hub's data folder where there is none; into a new one only its owner may look.

    Raises:
        LinkcppError: it cannot be made, or is not a folder.
    """
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unusable_folder(data, error) from error


def unusable_folder(folder: Path, error: OSError) -> LinkcppError:
    """Say that a hub's data folder, or a folder in it, cannot be used."""
    is_other = isinstance(error, FileExistsError | NotADirectoryError)
    what = "it is not a folder" if is_other else error.strerror or str(error)
    return LinkcppError(
        f"The folder {folder} cannot be used: {what}.", hint="Name another folder with --data."
    )
