"""Words in systemd unit files."""

import re


def quoted(word: str) -> str:
    """Quote a word for a unit file (systemd.syntax(7)), specifiers and variables literal."""
    literal = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return literal if re.fullmatch(r"[\w@%+=:,./-]+", literal) else f'"{literal}"'
