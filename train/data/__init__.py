"""Data sets by the names that configs use."""

from train.data.digits import Digits, DigitScenes
from train.data.images import Data, ImageFolder, Images

DATA: dict[str, type[Data]] = {"digits": Digits, "digit_scenes": DigitScenes, "image_folder": ImageFolder}

__all__ = ["DATA", "Data", "DigitScenes", "Digits", "ImageFolder", "Images"]
