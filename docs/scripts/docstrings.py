"""An extension of griffe: docstrings, whose markup is that of reStructuredText, as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

from render import prose

#: The colons before a block of code.
_CODE = re.compile(r"::$", re.MULTILINE)


class MarkdownDocstrings(griffe.Extension):
    """Replaces roles, literals and code blocks of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = _CODE.sub(":", prose(obj.docstring.value))
