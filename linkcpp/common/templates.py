"""Filling in the templates that ship with linkcpp, or the user's own in their place."""

from typing import Any

import jinja2

from linkcpp.common.errors import LinkcppError
from linkcpp.common.resources import resource_folder


def render(template: str, values: dict[str, Any], *, own_templates: str | None = None) -> str:
    """Fill a template in; a file of the user's folder goes before the one that ships.

    Raises:
        LinkcppError: the template names a value that does not exist, or is not valid Jinja.
    """
    folders = [own_templates] if own_templates else []
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, resource_folder("templates")]),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - command lines and unit files, never HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    try:
        return environment.get_template(template).render(values)
    except jinja2.TemplateError as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise LinkcppError(
            f"The template {template}{line} cannot be filled in: {error}.",
            hint=f"Compare it with {resource_folder('templates') / template}.",
        ) from error
