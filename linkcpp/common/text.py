"""Text from outside (file names, headers, other machines), made fit for a terminal."""

LONGEST_NAME = 64


def printable(text: str, limit: int = LONGEST_NAME) -> str:
    """Replace what is not printable (escape sequences, line ends, bidi marks) and cut to ``limit``.

    Names come from peers that may be hostile: an escape sequence in one would reach the terminal.
    """
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in cut)
