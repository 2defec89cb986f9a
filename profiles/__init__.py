"""Data, no logic: hardware, models and measurements as JSON, each number with its source."""

import json
from importlib import resources
from typing import Any

__all__ = ["read_json"]


def read_json(*parts: str) -> Any:
    """The parsed content of one shipped file, named from this folder: ``read_json("hardware", "facts.json")``.

    Raises:
        FileNotFoundError: if no such file is shipped.
    """
    return json.loads(resources.files("trainplan.profiles").joinpath(*parts).read_text(encoding="utf-8"))
