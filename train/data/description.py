"""data.json: what the users of a trained classifier must know of its data, so that these need not be there."""

from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from train.data.images import Images
from train.schema import Node

DESCRIPTION = "data.json"


class Description(Node):
    """What a classifier sees, and what its outputs are called. Written beside a run, read when its model is used."""

    classes: tuple[str, ...] = Field(min_length=1)
    num_channels: PositiveInt
    height: PositiveInt
    width: PositiveInt
    mean: tuple[float, ...]
    std: tuple[PositiveFloat, ...]


def describe(images: Images) -> Description:
    """The description of loaded data."""
    return Description(**{name: getattr(images, name) for name in Description.model_fields})


def read_description(folder: Path) -> Description:
    """The description in a run's folder.

    Raises:
        ValueError: there is none, or none that can be read.
    """
    path = folder / DESCRIPTION
    try:
        return Description.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder}: holds no {DESCRIPTION}, which a run writes when it starts") from None
    except (ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no readable description of data ({' '.join(str(error).split())})") from error
