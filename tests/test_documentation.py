"""The documents name files that exist: who renames one renames it there, too."""

import re
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
DOCUMENTS = [*TOP.glob("*.md"), *TOP.glob("docs/**/*.md")]
FOLDERS = ("linkcpp", "tests", "benchmarks", "bin")
MODULES = [str(path) for folder in FOLDERS for path in (TOP / folder).rglob("*.py")]
_MODULE = re.compile(r"(?<![\w./-])((?:[a-z]\w*/)*[a-z]\w*\.py)\b")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(TOP)))
def test_a_document_names_files_that_exist(document: Path) -> None:
    text = document.read_text()
    missing = [
        name
        for name in _MODULE.findall(text)
        # A document may leave out the folders that its readers know.
        if not any(module.endswith(f"/{name}") for module in MODULES)
    ]
    missing += [name for name in _LINK.findall(text) if not (document.parent / name).exists()]
    assert not missing
