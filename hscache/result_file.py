"""Results of measurements as files: asked for before the work, written whole after it.

Takes the path a user gave, or None for no file; what would fail in an hour is said at once.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from hscache import files
from hscache.errors import ConfigError, HscacheError


def require_writable(path: Path | None) -> None:
    """Make the folder of a result; raise HscacheError if the file could not be written there."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"the result file {path} is a folder; give a file to write.")
    files.make_folder(path.parent)
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise HscacheError(
            f"the result file {path} could not be written after the work: {error.strerror}. Give "
            "another place."
        ) from error


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write figures, if a file is wanted."""
    if path is not None:
        files.replace_atomically(path, json.dumps(figures, indent=1).encode() + b"\n")
