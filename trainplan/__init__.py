"""Planning and running fast LLM training.

The package is made of the folders planner, costmodel, executor, kernels and profiles of the repository, linked here.
"""

from pathlib import Path as _Path

__version__ = "0.1.0"

for _name in ("planner", "costmodel", "executor", "kernels", "profiles"):
    if not (_Path(__file__).parent / _name).is_dir():
        raise ImportError(
            f"trainplan/{_name} is not a folder: the checkout lost its symbolic links (Windows or a zip download). "
            "Clone with `git clone -c core.symlinks=true`, or install a wheel."
        )
