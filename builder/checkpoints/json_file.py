"""The JSON files of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...models.errors import CheckpointError
from ...models.plain_files import read_object


def read_json(file: Path, folder: str = "Hugging Face checkpoint folder") -> dict[str, Any]:
    """Read a JSON object. folder: what the file's folder should be. Raises CheckpointError that names the file."""
    try:
        return read_object(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: is this a {folder}?") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}; download it again") from error
